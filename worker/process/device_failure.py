"""The error after which a worker must end. A file of its own, so that knowing it needs no torch."""


class DeviceFailed(Exception):
    """A step that was begun has failed on the device, which cannot be trusted with another one."""

"""The error after which a worker must exit. In a file of its own, which does not import torch."""


class DeviceFailed(Exception):
    """A launched step has failed on the device, which cannot be trusted to run another one."""

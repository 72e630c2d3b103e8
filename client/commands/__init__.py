"""The subcommands of `chairlift`, one file each; `bench` has a room of its own in client/bench."""

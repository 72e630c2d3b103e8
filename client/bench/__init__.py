"""`chairlift bench`: replays a workload against a server and says how fast it was."""

"""`chairlift batch`: files in the shape of OpenAI's batch API, answered by this server."""

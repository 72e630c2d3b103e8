"""vllm.grpc.engine.VllmEngine, by which the gateway `smg` drives Chairlift; the extra `gateway`."""

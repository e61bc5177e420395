"""vLLM's Marlin weight layout and its repack on the CPU."""

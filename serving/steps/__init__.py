"""One step on the device: its arrays, its programs, the sampler, and the model runner."""

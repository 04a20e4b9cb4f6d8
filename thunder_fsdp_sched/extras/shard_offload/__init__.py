"""Keep shards on the CPU: ``offload_policy=CPUOffloadPolicy()``."""

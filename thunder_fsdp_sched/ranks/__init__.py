"""Process groups, and the agreement of their ranks on what they shard, compile and run."""

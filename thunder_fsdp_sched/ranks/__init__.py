"""Process groups, and the agreement of their ranks on sharding, compiled traces and collectives."""

"""Agreement of the ranks on what they compile and on what they run."""

"""Reports of steps: tables, pictures, measured times and counted bytes."""

"""Parameters in bfloat16 that learn: what a sum of parameter and update loses is not lost."""

"""Parameters in few bits that learn: updates that rounding would swallow are not lost."""

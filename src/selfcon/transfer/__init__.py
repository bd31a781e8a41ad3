"""What a pretrained encoder is worth elsewhere: other data, other tasks, corrupted images."""

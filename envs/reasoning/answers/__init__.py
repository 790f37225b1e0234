"""What a response answers, and whether that equals the expected answer."""

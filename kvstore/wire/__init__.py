"""What processes say to each other: messages of engines and of peers, and their framing."""

"""What only a GPU can show. Each test is marked `gpu` and skipped where there is none."""

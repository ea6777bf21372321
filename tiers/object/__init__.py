"""The object tier: runs of blocks as objects of a bucket that several stores share."""

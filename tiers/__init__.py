"""Places that hold bytes: host memory, disks, peers; and the copies between them."""

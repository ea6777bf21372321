"""The store process: sessions, namespaces, the epoll loop, private stores."""

"""`disttrain dashboard`: the sources of its pages, and the server on the loopback interface."""

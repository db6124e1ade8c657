"""What is behind the commands that listen, ``serve`` and ``page``: who may ask, and what is answered."""

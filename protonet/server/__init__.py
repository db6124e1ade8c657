"""HTTP servers: predictions (``protonet serve``) and labelling in a browser (``protonet page``)."""

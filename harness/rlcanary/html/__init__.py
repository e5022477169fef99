"""HTML pages of one file each: no script, no request, no other file. They are made from plain data alone."""

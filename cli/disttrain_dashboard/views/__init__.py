"""Page data: objects of any content -> JSON of bounded size. Pure."""

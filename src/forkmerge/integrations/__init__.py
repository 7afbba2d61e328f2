"""ForkMerge beside other people's libraries; each is an extra, and is imported only when it is used."""

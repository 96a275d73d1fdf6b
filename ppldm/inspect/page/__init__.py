"""`ppldm stats --html`: a data set on one page."""

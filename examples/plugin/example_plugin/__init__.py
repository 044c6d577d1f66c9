"""Parts of Thinsection in a package of its own."""

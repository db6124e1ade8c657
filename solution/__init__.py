"""What is handed in to the contest, and the packer."""

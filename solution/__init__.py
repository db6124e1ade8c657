"""The contest submission and the packer."""

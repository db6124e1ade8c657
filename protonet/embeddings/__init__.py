"""What others have learned: networks that turn texts and pictures into rows. Weights come from the disk alone."""

"""A patch series judged over many wheels."""

"""Reports: what a run or a loop did, as one HTML file, a picture, or lines in a terminal."""

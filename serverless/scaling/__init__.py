"""The number of workers of a function, live (`scaler`) and for a recorded load (`replay`)."""

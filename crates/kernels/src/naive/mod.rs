//! Textbook twins of the kernels, for tests.

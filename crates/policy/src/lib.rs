//! The controller's decisions, pure: state, time and event in; actions and the reason out. No clock, no socket.

//! The step program: lowering, schedules, checker. No I/O.
pub mod instr;

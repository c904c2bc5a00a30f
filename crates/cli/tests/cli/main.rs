//! What a user of the binary sees: messages, exit codes, files, processes and digests.

mod account;
mod agent;
mod background;
mod bad_input;
mod check;
mod checked;
mod ckpt;
mod cluster;
mod common;
mod damaged;
mod detect;
mod disk;
mod doctor;
mod hosts;
mod hosts_cut;
mod layouts;
mod memory;
mod orphans;
mod output;
mod pin;
mod profile;
mod recover;
mod recovery;
mod s3;
mod signals;
mod tokens;

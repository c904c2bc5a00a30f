//! Hosts on one machine, for tests and `cargo xtask chaos --hosts`: network namespaces on a bridge of their own. Nothing of the
//! machine's own network is touched, and all is gone when the net is dropped.
//!
//! Needs root and the programs `ip` and `tc` (iproute2).

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Namespaces of nets that died without cleaning up are found by this, and the number of their process.
const PREFIX: &str = "lsnet";

/// Hosts that reach each other by TCP; the machine itself reaches none.
pub struct Net {
    name: String,
    subnet: u32,
    hosts: usize,
}

impl Net {
    /// Makes `hosts` of them.
    ///
    /// # Errors
    /// Why namespaces cannot be made here, and what is needed.
    pub fn new(hosts: usize) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        sweep();
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}x{made}", std::process::id());
        let net = Self { name, subnet: std::process::id().wrapping_add(made) % 250 + 1, hosts };
        net.make().map_err(|e| format!("{e}; network namespaces need root and iproute2's `ip`"))?;
        Ok(net)
    }

    fn make(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "br0", "up"])?;
        for host in 0..self.hosts {
            let (space, port) = (self.space(host), port(host));
            ip(&["netns", "add", &space])?;
            let ends =
                ["link", "add", "eth0", "netns", &space, "type", "veth", "peer", "name", &port, "netns", &switch];
            ip(&ends)?;
            ip(&["-n", &switch, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &space, "addr", "add", &format!("{}/24", self.address(host)), "dev", "eth0"])?;
            ip(&["-n", &space, "link", "set", "eth0", "up"])?;
            ip(&["-n", &space, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}sw", self.name)
    }

    fn space(&self, host: usize) -> String {
        format!("{}h{host}", self.name)
    }

    /// Where `host` is.
    pub fn address(&self, host: usize) -> String {
        format!("10.77.{}.{}", self.subnet, host + 1)
    }

    /// `program` on `host`; its process is that of the command.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(host)]).arg(program).stdin(Stdio::null());
        command
    }

    /// Pulls the plug of `host`, or puts it in again.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn plug(&self, host: usize, in_: bool) -> Result<(), String> {
        ip(&["-n", &self.switch(), "link", "set", &port(host), if in_ { "up" } else { "down" }])
    }

    /// Lets the way to `host` carry no more than `how` (words of `tc qdisc`, such as `tbf rate 20mbit burst 32kbit latency 50ms`),
    /// or all again.
    ///
    /// # Errors
    /// What the system refuses, such as a discipline that this kernel does not have.
    pub fn shape(&self, host: usize, how: Option<&str>) -> Result<(), String> {
        let (switch, port) = (self.switch(), port(host));
        let on = |verb| ["-n", switch.as_str(), "qdisc", verb, "dev", port.as_str(), "root"].into_iter();
        match how {
            Some(how) => run("tc", &on("replace").chain(how.split(' ')).collect::<Vec<_>>()),
            // That nothing is there is no error.
            None => run("tc", &on("del").collect::<Vec<_>>()).or(Ok(())),
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        (0..self.hosts).map(|host| self.space(host)).chain([self.switch()]).for_each(|space| {
            let _ = ip(&["netns", "del", &space]);
        });
    }
}

fn port(host: usize) -> String {
    format!("p{host}")
}

fn ip(args: &[&str]) -> Result<(), String> {
    run("ip", args)
}

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let out = Command::new(program).args(args).stdin(Stdio::null()).output().map_err(|e| format!("{program}: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

/// Takes away what dead processes left.
fn sweep() {
    let Ok(out) = Command::new("ip").args(["netns", "list"]).output() else { return };
    for space in String::from_utf8_lossy(&out.stdout).lines().filter_map(|line| line.split(' ').next()) {
        let owner = space.strip_prefix(PREFIX).and_then(|rest| rest.split('x').next());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = ip(&["netns", "del", space]);
        }
    }
}

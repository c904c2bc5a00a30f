//! A machine as measured: what `lockstep doctor --measure` saves and planning reads.
//!
//! A file of TOML. Rates are in GFLOP/s and GB/s (10^9), times in microseconds, sizes in bytes:
//!
//! ```toml
//! kind = "lockstep-cluster"   # what nobody else writes
//! schema = 1
//! name = "here"
//! measured = "20261129T200000Z"
//! cpu = "Intel(R) Xeon(R) Processor"
//! cores = 2                   # that were allowed
//! simd = "avx512"
//! memory_bytes = 50000000000
//! peak_gflops_core = 98.0     # register-only fused multiply-adds: one core, all cores
//! peak_gflops = 196.0
//! memory_gb_s_core = 14.0     # triad of STREAM: one core, all cores
//! memory_gb_s = 27.0
//!
//! [[product]]                 # [rows, inner] x [inner, cols], float32
//! rows = 2048
//! inner = 256
//! cols = 704
//! gflops_core = 80.0
//! gflops = 150.0
//!
//! [[link]]                    # between two ranks of this machine
//! transport = "shm"           # shm, tcp or threads
//! latency_us = 4.0            # half a round trip of 8 bytes
//! gb_s = 3.0                  # one way, messages of 16 MiB
//! ```

use serde::{Deserialize, Serialize};

use crate::error::SpecError;

/// What makes a file one of ours.
pub const KIND: &str = "lockstep-cluster";
/// Version of the keys; raised when a reader would have to change.
pub const SCHEMA: u32 = 1;

/// One kind of machine and its links, as in the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// [`KIND`]
    pub kind: String,
    /// [`SCHEMA`]
    pub schema: u32,
    /// What it is called; `here` is the machine that measured itself.
    pub name: String,
    /// When, such as 20261129T200000Z.
    pub measured: String,
    /// The model of the CPU.
    pub cpu: String,
    /// Cores that were allowed.
    pub cores: usize,
    /// Instruction path.
    pub simd: String,
    /// Memory of the machine, or what its control group leaves.
    pub memory_bytes: u64,
    /// Peak of one core, GFLOP/s.
    pub peak_gflops_core: f64,
    /// Peak of all cores together, GFLOP/s.
    pub peak_gflops: f64,
    /// Memory bandwidth of one core, GB/s.
    pub memory_gb_s_core: f64,
    /// Memory bandwidth of all cores together, GB/s.
    pub memory_gb_s: f64,
    /// Products of a few sizes.
    pub product: Vec<Product>,
    /// Ways between two ranks.
    pub link: Vec<ClusterLink>,
}

/// How fast a product is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Product {
    /// Rows of the left operand.
    pub rows: usize,
    /// Its columns.
    pub inner: usize,
    /// Columns of the right operand.
    pub cols: usize,
    /// GFLOP/s on one core.
    pub gflops_core: f64,
    /// GFLOP/s on all cores.
    pub gflops: f64,
}

/// How fast a transport is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterLink {
    /// As `layout.transport`.
    pub transport: String,
    /// Half a round trip of a small message, microseconds.
    pub latency_us: f64,
    /// Large messages one way, GB/s.
    pub gb_s: f64,
}

impl Cluster {
    /// Reads the text of the file called `name`.
    ///
    /// # Errors
    /// Text that is no cluster file, another schema, or rates that are not above zero.
    pub fn parse(text: &str, name: &str) -> Result<Self, SpecError> {
        let syntax = |message: String| SpecError::Syntax { path: crate::error::Origin::other(name), message };
        let cluster: Self = toml::from_str(text).map_err(|e| syntax(e.to_string()))?;
        let remedy = "measure again with `lockstep doctor --measure`";
        if cluster.kind != KIND || cluster.schema != SCHEMA {
            return Err(SpecError::law(
                format!("{name} is no cluster file that this version reads"),
                format!("kind {:?}, schema {}; needed: {KIND:?}, {SCHEMA}", cluster.kind, cluster.schema),
                remedy,
            ));
        }
        match cluster.rates().into_iter().find(|(_, rate)| !(rate.is_finite() && *rate > 0.0)) {
            Some((key, rate)) => Err(SpecError::law(
                format!("{name}: {key} = {rate}, and a rate or a time is above 0"),
                format!("{key} {rate}"),
                remedy,
            )),
            None => Ok(cluster),
        }
    }

    /// The file.
    pub fn to_toml(&self) -> String {
        let body = toml::to_string(self).expect("plain data");
        format!(
            "# A machine as `lockstep doctor --measure` found it; lockstep writes this file anew when asked to.\n\
             # GFLOP/s and GB/s (10^9), microseconds, bytes. `_core`: one core; without: all of them together.\n{body}"
        )
    }

    /// True if `text` is a cluster file of any schema: one that lockstep may write anew.
    pub fn owns(text: &str) -> bool {
        text.parse::<toml::Table>().is_ok_and(|t| t.get("kind").and_then(toml::Value::as_str) == Some(KIND))
    }

    fn rates(&self) -> Vec<(&'static str, f64)> {
        let mut all = vec![
            ("peak_gflops_core", self.peak_gflops_core),
            ("peak_gflops", self.peak_gflops),
            ("memory_gb_s_core", self.memory_gb_s_core),
            ("memory_gb_s", self.memory_gb_s),
        ];
        for product in &self.product {
            all.extend([("product.gflops_core", product.gflops_core), ("product.gflops", product.gflops)]);
        }
        for link in &self.link {
            all.extend([("link.latency_us", link.latency_us), ("link.gb_s", link.gb_s)]);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> Cluster {
        Cluster {
            kind: KIND.into(),
            schema: SCHEMA,
            name: "here".into(),
            measured: "20261129T200000Z".into(),
            cpu: "a \"CPU\"".into(),
            cores: 2,
            simd: "avx2".into(),
            memory_bytes: 1 << 34,
            peak_gflops_core: 90.5,
            peak_gflops: 180.0,
            memory_gb_s_core: 12.0,
            memory_gb_s: 20.0,
            product: vec![Product { rows: 64, inner: 256, cols: 704, gflops_core: 70.0, gflops: 120.0 }],
            link: vec![ClusterLink { transport: "shm".into(), latency_us: 4.5, gb_s: 2.5 }],
        }
    }

    #[test]
    fn a_file_reads_back_and_is_ours() {
        let text = cluster().to_toml();
        assert_eq!(Cluster::parse(&text, "here.toml").unwrap(), cluster());
        assert!(Cluster::owns(&text) && Cluster::owns(&text.replace("schema = 1", "schema = 99")));
        for other in ["", "kind = 3", "[kind]\nx = 1", "not toml at all [", "name = \"here\""] {
            assert!(!Cluster::owns(other), "{other:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refused = |from: &str, to: &str| {
            let text = cluster().to_toml();
            assert!(text.contains(from));
            Cluster::parse(&text.replace(from, to), "here.toml").unwrap_err().to_string()
        };
        assert!(refused("schema = 1", "schema = 2").contains("schema 2; needed: \"lockstep-cluster\", 1"));
        assert!(refused("gb_s = 2.5", "gb_s = -2.5").contains("link.gb_s = -2.5"));
        assert!(refused("peak_gflops = 180.0", "peak_gflops = nan").contains("peak_gflops = NaN"));
        assert!(refused("latency_us", "latency_ms").contains("here.toml is not valid TOML"));
        assert!(refused("name = \"here\"\n", "").contains("missing field `name`"));
    }
}

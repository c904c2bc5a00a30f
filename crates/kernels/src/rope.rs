//! Rotary position embedding, rotate-half form (element i pairs with i + head_dim / 2), as Llama and Qwen3 use it.

use crate::ctx::{Ctx, Rows};
use crate::math::{pow64, sin_cos64};
use crate::simd::by_level;

/// Cosines and sines of angle = position * theta^(-2i / head_dim), computed in f64, rounded to f32.
#[derive(Clone, Debug)]
pub struct RopeTable {
    head_dim: usize,
    positions: usize,
    // positions x head_dim / 2.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Table for positions 0..`positions`; `head_dim` is even.
    pub fn new(head_dim: usize, theta: f64, positions: usize) -> Self {
        assert!(head_dim > 0 && head_dim.is_multiple_of(2), "head_dim {head_dim} is not even: RoPE rotates pairs");
        let half = head_dim / 2;
        let frequency: Vec<f64> = (0..half).map(|i| pow64(theta, -2.0 * i as f64 / head_dim as f64)).collect();
        let angles = (0..positions).flat_map(|p| frequency.iter().map(move |f| p as f64 * f));
        let (sin, cos) = angles
            .map(|angle| {
                let (sin, cos) = sin_cos64(angle);
                (sin as f32, cos as f32)
            })
            .unzip();
        RopeTable { head_dim, positions, cos, sin }
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Positions that the table covers.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// (cos, sin) of one position, head_dim / 2 each.
    pub fn row(&self, position: usize) -> (&[f32], &[f32]) {
        assert!(position < self.positions, "position {position} outside of a RoPE table of {}", self.positions);
        let half = self.head_dim / 2;
        let range = position * half..(position + 1) * half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Rotates each head in place. x: rows x (heads * head_dim); positions: rows.
pub fn rope(ctx: &Ctx, table: &RopeTable, positions: &[u32], heads: usize, x: &mut [f32]) {
    rotate(ctx, table, positions, heads, x, false);
}

/// Gradient of [`rope`], in place: the inverse rotation.
pub fn rope_backward(ctx: &Ctx, table: &RopeTable, positions: &[u32], heads: usize, x: &mut [f32]) {
    rotate(ctx, table, positions, heads, x, true);
}

fn rotate(ctx: &Ctx, table: &RopeTable, positions: &[u32], heads: usize, x: &mut [f32], inverse: bool) {
    let width = heads * table.head_dim;
    assert_eq!(x.len(), positions.len() * width, "rope of {} rows x {width}", positions.len());
    ctx.split_rows(positions.len(), width, Rows(x, width), |r, x| {
        rows(ctx.level(), table, &positions[r], heads, x.0, inverse);
    });
}

by_level! {
    fn rows(table: &RopeTable, positions: &[u32], heads: usize, x: &mut [f32], inverse: bool) {
        let half = table.head_dim / 2;
        let width = heads * table.head_dim;
        if width == 0 {
            return;
        }
        for (x, &position) in x.chunks_exact_mut(width).zip(positions) {
            let (cos, sin) = table.row(position as usize);
            for head in x.chunks_exact_mut(2 * half) {
                let (a, b) = head.split_at_mut(half);
                for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    let sin = if inverse { -sin } else { *sin };
                    let (x0, x1) = (*a, *b);
                    *a = x0.mul_add(*cos, -(x1 * sin));
                    *b = x1.mul_add(*cos, x0 * sin);
                }
            }
        }
    }
}

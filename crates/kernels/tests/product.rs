//! The product's law, spelled out, for random shapes, strides and offsets.

mod common;

use common::{normal, same, teams};
use kernels::{Acc, Ctx, KC, Mat, MatMut, Packed, Right, product, products};
use proptest::prelude::*;

/// The law word for word.
fn spelled(a: Mat, b: Mat, c: &mut [f32], acc: Acc) {
    for i in 0..a.rows {
        for j in 0..b.cols {
            let c = &mut c[i * b.cols + j];
            if acc == Acc::Store && a.cols == 0 {
                *c = 0.0;
            }
            for k0 in (0..a.cols).step_by(KC) {
                let mut s = 0.0f32;
                for k in k0..a.cols.min(k0 + KC) {
                    s = a.at(i, k).mul_add(b.at(k, j), s);
                }
                *c = if acc == Acc::Store && k0 == 0 { s } else { *c + s };
            }
        }
    }
}

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    transposed: bool,
    padding: usize,
    column_stride: usize,
    offset: usize,
}

fn layout() -> impl Strategy<Value = Layout> {
    (any::<bool>(), 0..5usize, 1..3usize, 0..8usize).prop_map(|(transposed, padding, column_stride, offset)| Layout {
        transposed,
        padding,
        column_stride,
        offset,
    })
}

impl Layout {
    /// Memory that holds `m` in this layout; elsewhere NaN, so that a stray read shows.
    fn store(&self, m: Mat) -> Vec<f32> {
        let view = self.view(&[], m.rows, m.cols);
        let len = self.offset + m.rows * view.rs.max(1) + m.cols * view.cs.max(1) + view.rs * view.cs;
        let mut data = vec![f32::NAN; len];
        for i in 0..m.rows {
            for j in 0..m.cols {
                data[self.offset + i * view.rs + j * view.cs] = m.at(i, j);
            }
        }
        data
    }

    fn view<'a>(&self, data: &'a [f32], rows: usize, cols: usize) -> Mat<'a> {
        let data = data.get(self.offset..).unwrap_or(&[]);
        let inner = if self.transposed { rows } else { cols };
        let (outer_stride, inner_stride) = (inner * self.column_stride + self.padding, self.column_stride);
        let (rs, cs) = if self.transposed { (inner_stride, outer_stride) } else { (outer_stride, inner_stride) };
        Mat { data, rows, cols, rs, cs }
    }
}

fn depth() -> impl Strategy<Value = usize> {
    prop_oneof![0..40usize, 250..262usize, 510..515usize]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn follows_its_law(
        (m, n, k) in (0..48usize, 0..140usize, depth()),
        (la, lb) in (layout(), layout()),
        (c_padding, c_offset, add) in (0..4usize, 0..8usize, any::<bool>()),
    ) {
        let acc = if add { Acc::Add } else { Acc::Store };
        let (a, b, c) = (normal(1, m * k), normal(2, k * n), normal(3, m * n));
        let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
        let mut expected = c.clone();
        spelled(a, b, &mut expected, acc);
        let (a_data, b_data) = (la.store(a), lb.store(b));
        let rs = n + c_padding;
        for ctx in teams() {
            let mut found = vec![7.0; c_offset + m * rs];
            for i in 0..m {
                found[c_offset + i * rs..][..n].copy_from_slice(&c[i * n..][..n]);
            }
            let view = MatMut::with_stride(&mut found[c_offset..], m, n, rs);
            product(&ctx, la.view(&a_data, m, k), lb.view(&b_data, k, n), view, acc);
            for i in 0..m {
                let row = &found[c_offset + i * rs..][..rs];
                same("row", &row[..n], &expected[i * n..][..n]);
                prop_assert!(row[n..].iter().all(|&x| x == 7.0), "wrote beside the view");
            }
        }
    }
}

/// Shapes beyond one block of rows and of columns, cut in rows and columns.
#[test]
fn rows_and_columns_are_free() {
    let (m, n, k) = (530, 1100, 300);
    let (a, b) = (normal(1, m * k), normal(2, k * n));
    let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
    let mut whole = vec![0.0; m * n];
    product(&Ctx::new(kernels::Simd::Scalar, 1), a, b, MatMut::new(&mut whole, m, n), Acc::Store);
    for ctx in teams() {
        for (rows, cols) in [(0..m, 0..n), (3..4, 0..n), (100..399, 1000..1100), (0..m, 1023..1025)] {
            let mut part = vec![0.0; rows.len() * cols.len()];
            let view = MatMut::new(&mut part, rows.len(), cols.len());
            product(&ctx, a.rows_range(rows.clone()), b.cols_range(cols.clone()), view, Acc::Store);
            for (found, i) in part.chunks(cols.len()).zip(rows) {
                same(&format!("row {i}, {cols:?}, {ctx:?}"), found, &whole[i * n..][cols.clone()]);
            }
        }
    }
}

/// A tall right operand that is packed in pieces of its inner index, and the last piece is no whole block.
#[test]
fn a_tall_operand_keeps_the_order_of_its_blocks() {
    let (m, n, k) = (40, 250, 9000);
    let (a, b, before) = (normal(1, m * k), normal(2, k * n), normal(3, m * n));
    let across = Layout { transposed: true, padding: 0, column_stride: 1, offset: 0 };
    let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
    let (turned_a, turned_b) = (across.store(a), across.store(b));
    let (turned_a, turned_b) = (across.view(&turned_a, m, k), across.view(&turned_b, k, n));
    for acc in [Acc::Store, Acc::Add] {
        let mut expected = before.clone();
        spelled(a, b, &mut expected, acc);
        for ctx in teams() {
            for (a, b) in [(a, b), (turned_a, turned_b)] {
                let mut found = before.clone();
                product(&ctx, a, b, MatMut::new(&mut found, m, n), acc);
                same(&format!("{acc:?}, {ctx:?}"), &found, &expected);
            }
        }
    }
}

/// An operand that stays packed gives the same bits, also after another one was packed in its place, and beside plain ones
/// whether these are packed together or piece by piece.
#[test]
fn what_stays_packed_is_the_operand() {
    for (m, n, k) in [(1, 1, 1), (30, 70, 300), (300, 600, 513)] {
        let (a, b, other) = (normal(1, m * k), normal(2, k * n), normal(3, k * n));
        let wide = normal(4, k * 2100);
        let (a, b, wide) = (Mat::new(&a, m, k), Mat::new(&b, n, k).t(), Mat::new(&wide, k, 2100));
        for ctx in teams() {
            let mut packed = Packed::default();
            packed.pack(&ctx, Mat::new(&other, k, n));
            packed.pack(&ctx, b);
            assert_eq!(packed.shape(), (k, n));
            for plain in [b, wide] {
                let mut expected = [vec![0.5; m * n], vec![0.5; m * plain.cols]];
                let mut found = expected.clone();
                product(&ctx, a, b, MatMut::new(&mut expected[0], m, n), Acc::Add);
                product(&ctx, a, plain, MatMut::new(&mut expected[1], m, plain.cols), Acc::Add);
                let [first, second] = &mut found;
                let list = vec![(a, 1, MatMut::new(first, m, n)), (a, 0, MatMut::new(second, m, plain.cols))];
                products(&ctx, &[Right::Plain(plain), (&packed).into()], list, Acc::Add);
                same(&format!("{m} {n} {k}, {ctx:?}"), &found[0], &expected[0]);
                same(&format!("plain of {}, {ctx:?}", plain.cols), &found[1], &expected[1]);
            }
        }
    }
}

#[test]
#[should_panic(expected = "product of 2 x 3 and 4 x 5")]
fn shapes_must_agree() {
    let x = [0.0; 20];
    let mut c = [0.0; 10];
    let ctx = Ctx::new(kernels::Simd::Scalar, 1);
    product(&ctx, Mat::new(&x, 2, 3), Mat::new(&x, 4, 5), MatMut::new(&mut c, 2, 5), Acc::Store);
}

//! Operations of convolutional networks whose gradients are wrong in candle 0.11: one-dimensional convolution and
//! maximum pooling.

use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{Reader, stored, tensor};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, element_rooms, floats};
use crate::parallel::{Output, parts, split};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};
use std::ops::Range;

/// Computes the one-dimensional convolution that `Tensor::conv1d` computes, with its gradients. `x` is
/// `[batch, channels, time]`, and `kernel` is `[outputs, channels / groups, width]`.
///
/// # Errors
/// Fails if the shapes or dtypes do not match.
pub fn conv1d(
    x: &Tensor,
    kernel: &Tensor,
    padding: usize,
    stride: usize,
    dilation: usize,
    groups: usize,
) -> Result<Tensor> {
    let x = x.pad_with_zeros(2, padding, padding)?.unsqueeze(2)?;
    x.conv2d(&kernel.unsqueeze(2)?, 0, stride, dilation, groups)?.squeeze(2)
}

/// Computes the maximum of each window of `kernel` × `kernel` positions, as `torch.nn.MaxPool2d` does. `x` is f32, bf16
/// or f16 of shape `[batch, channels, height, width]`. Windows are `stride` positions apart. `padding` positions, at
/// most half a window, are added on each side; they are never the maximum. If several positions have the maximum, the
/// first one gets the gradient.
///
/// # Errors
/// Fails if the window is larger than the padded image or a number is out of range. Also fails on a GPU, where this
/// operation is not implemented.
pub fn max_pool2d(x: &Tensor, kernel: usize, stride: usize, padding: usize) -> Result<Tensor> {
    let (_, _, height, width) = x.dims4()?;
    if kernel == 0 || stride == 0 || 2 * padding > kernel || kernel > height.min(width) + 2 * padding {
        bail!(
            "{OP}: windows of {kernel} with stride {stride} and padding {padding} do not fit images of {height} × {width}"
        );
    }
    let sides = [height, width].map(|side| [side, (side + 2 * padding - kernel) / stride + 1]);
    apply([x], MaxPool { kernel, stride, padding, sides })
}

const OP: &str = "max-pool2d";

struct MaxPool {
    kernel: usize,
    stride: usize,
    padding: usize,
    /// `[[input height, output height], [input width, output width]]`.
    sides: [[usize; 2]; 2],
}

impl MaxPool {
    /// Returns the number of elements of an input image and of an output image.
    fn areas(&self) -> [usize; 2] {
        [0, 1].map(|side| self.sides[0][side] * self.sides[1][side])
    }

    /// Returns the input positions along `axis` that output position `at` covers.
    fn window(&self, axis: usize, at: usize) -> Range<usize> {
        let start = at * self.stride;
        start.saturating_sub(self.padding)..(start + self.kernel - self.padding).min(self.sides[axis][0])
    }

    /// Calls `each` with every output position and the position of its maximum in the image. As in PyTorch, NaN counts
    /// as the largest number.
    fn maxima(&self, image: &[f32], mut each: impl FnMut(usize, usize)) {
        let [[_, rows], [width, columns]] = self.sides;
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let mut best = (f32::NEG_INFINITY, None);
            for y in self.window(0, row) {
                for at in self.window(1, column).map(|x| y * width + x) {
                    let value = image[at];
                    if best.1.is_none() || value > best.0 || value.is_nan() && !best.0.is_nan() {
                        best = (value, Some(at));
                    }
                }
            }
            if let Some(at) = best.1 {
                each(row * columns + column, at);
            }
        }
    }

    /// Fills one output per image, `floats` elements long. `work` gets the index of an image and its values.
    fn each_image(&self, x: &View<'_>, floats: usize, work: impl Fn(usize, &[f32], &mut [f32]) + Sync) -> Vec<f32> {
        let (elements, [area, _]) = (x.elements(), self.areas());
        let images = elements.len() / area;
        let mut out = vec![0.0; images * floats];
        split(images, area, [Output { data: &mut out, floats }], |range, [out]| {
            let mut reader = Reader::new(elements);
            for (image, out) in range.zip(out.chunks_exact_mut(floats)) {
                work(image, reader.floats(image * area..(image + 1) * area), out);
            }
        });
        out
    }
}

impl Footprint for MaxPool {
    const READS: Reads = Reads::inputs([true, false, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (x, dtype) = (inputs[0], inputs[0].dtype());
        let (batch, channels, ..) = x.dims4()?;
        let (images, [area, out]) = (batch * channels, self.areas());
        // Counts the f32 result before it is rounded, and one image per thread that is widened to f32.
        let wide = |elements: usize| match dtype {
            DType::F32 => 0,
            _ => floats(elements) + (parts(images, area) as u64 * floats(area)).max(element_rooms(dtype, elements, 0)),
        };
        let shape = [batch, channels, self.sides[0][1], self.sides[1][1]];
        Ok(Costs { forward: wide(images * out), backward: wide(images * area), ..Costs::new(&shape[..], dtype) })
    }
}

impl Op<1> for MaxPool {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let (batch, channels, ..) = xl.shape().dims4()?;
        let x = View::new(OP, xs, xl)?;
        let out = self.each_image(&x, self.areas()[1], |_, image, out| {
            self.maxima(image, |to, from| out[to] = image[from]);
        });
        let shape = (batch, channels, self.sides[0][1], self.sides[1][1]);
        Ok((stored(OP, out, xs.dtype())?, shape.into()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let _timed = measure::backward(OP);
        let [area, out] = self.areas();
        let held = (x.storage_and_layout(), dy.storage_and_layout());
        let (xs, dy) = (View::of(OP, &held.0)?, View::of(OP, &held.1)?);
        let gradients = dy.elements();
        let dx = self.each_image(&xs, area, |index, image, dx| {
            let mut reader = Reader::new(gradients);
            let dy = reader.floats(index * out..(index + 1) * out);
            self.maxima(image, |from, to| dx[to] += dy[from]);
        });
        Ok([Some(tensor(stored(OP, dx, x.dtype())?, x.shape()))])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    fn gradient(x: Vec<f32>, shape: (usize, usize, usize, usize), of: [usize; 3]) -> (Vec<f32>, Vec<f32>) {
        let x = Var::from_vec(x, shape, &Device::Cpu).unwrap();
        let y = max_pool2d(&x, of[0], of[1], of[2]).unwrap();
        let count = y.elem_count();
        let weights = Tensor::arange(1.0_f32, count as f32 + 1.0, &Device::Cpu).unwrap();
        let loss = (y.flatten_all().unwrap() * weights).unwrap().sum_all().unwrap();
        let gradient = loss.backward().unwrap().get(&x).unwrap().flatten_all().unwrap();
        (y.flatten_all().unwrap().to_vec1().unwrap(), gradient.to_vec1().unwrap())
    }

    /// The expected values are those of `torch.nn.functional.max_pool2d(x, 3, 2, 1)`.
    #[test]
    fn overlapping_windows_add_their_gradients() {
        let x = vec![1.0, 5.0, 2.0, 0.0, 3.0, 9.0, 4.0, 4.0, 7.0, 1.0, 8.0, 6.0, 2.0, 2.0, 2.0, 2.0];
        let (y, dx) = gradient(x, (1, 1, 4, 4), [3, 2, 1]);
        assert_eq!(y, [9.0, 9.0, 9.0, 9.0]);
        let mut expected = vec![0.0; 16];
        expected[5] = 1.0 + 2.0 + 3.0 + 4.0;
        assert_eq!(dx, expected);
    }

    #[test]
    fn the_first_of_several_maxima_gets_the_gradient() {
        let (y, dx) = gradient(vec![0.0; 32], (2, 1, 4, 4), [2, 2, 0]);
        assert_eq!(y, [0.0; 8]);
        let first = |i: usize| i.is_multiple_of(2) && (i / 4).is_multiple_of(2);
        let mut next = 0.0;
        let expected: Vec<f32> = (0..32)
            .map(|i| {
                next += f32::from(u8::from(first(i)));
                if first(i) { next } else { 0.0 }
            })
            .collect();
        assert_eq!(dx, expected);
    }

    #[test]
    fn forwards_agree_with_candle_in_every_dtype() {
        let numbers: Vec<f32> = (0..2 * 3 * 6 * 8).map(|i| (i * 7919 % 1009) as f32 / 64.0 - 8.0).collect();
        let x = Tensor::from_vec(numbers, (2, 3, 6, 8), &Device::Cpu).unwrap();
        #[expect(clippy::disallowed_methods, reason = "only the forward is compared")]
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = x.to_dtype(dtype).unwrap();
            for (kernel, stride) in [(2, 2), (3, 1), (2, 3)] {
                let [own, theirs] =
                    [max_pool2d(&x, kernel, stride, 0), x.max_pool2d_with_stride(kernel, stride)].map(|y| {
                        let y = y.unwrap();
                        (
                            y.dims().to_vec(),
                            y.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(),
                        )
                    });
                assert_eq!(own, theirs, "{dtype:?} {kernel} {stride}");
            }
        }
    }

    #[test]
    fn windows_that_do_not_fit_are_errors() {
        let x = Tensor::zeros((1, 1, 3, 5), DType::F32, &Device::Cpu).unwrap();
        for [kernel, stride, padding] in [[4, 1, 0], [2, 0, 0], [0, 1, 0], [2, 1, 2]] {
            let error = max_pool2d(&x, kernel, stride, padding).unwrap_err().to_string();
            assert!(error.contains("do not fit images of 3 × 5"), "{error}");
        }
    }
}

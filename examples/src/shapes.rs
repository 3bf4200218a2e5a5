//! The images of `vit.rs` and `resnet.rs`: drawn crosses, disks and squares in folders of classes.

use std::ops::Range;
use std::path::{Path, PathBuf};

use zero_train::data::{ImageFolder, images};

/// Pixels on a side.
pub(crate) const SIZE: u32 = 16;
/// The classes in the order of their indices.
pub(crate) const CLASSES: [&str; 3] = ["cross", "disk", "square"];

/// A folder with the data sets `train` and `valid`; dropping the value removes the folder.
pub(crate) struct Shapes(PathBuf);

impl Shapes {
    /// Draws 100 images of each class for training and 30 for evaluation. Every rank draws the same images into a
    /// folder of its own.
    pub(crate) fn draw(example: &str) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("zero-train-{example}-{}", std::process::id()));
        let shapes = Self(folder);
        draw(&shapes.0.join("train"), 0..100)?;
        draw(&shapes.0.join("valid"), 100..130)?;
        Ok(shapes)
    }

    /// Opens a data set.
    pub(crate) fn images(&self, name: &str) -> anyhow::Result<ImageFolder> {
        let images = images(self.0.join(name), [SIZE, SIZE])?.normalize([0.5; 3], [0.25; 3]);
        assert_eq!(images.classes(), CLASSES);
        Ok(images)
    }
}

impl Drop for Shapes {
    fn drop(&mut self) {
        // A folder that cannot be removed is not an error.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Draws the shapes with these numbers for each class, in several sizes, places and colors: `folder/disk/17.ppm`.
fn draw(folder: &Path, shapes: Range<i32>) -> std::io::Result<()> {
    for (class, name) in CLASSES.iter().enumerate() {
        std::fs::create_dir_all(folder.join(name))?;
        for i in shapes.clone() {
            let (x, y, radius) = (5 + i * 7 % 6, 5 + i * 5 % 7, 2 + i % 3);
            let inside = |dx: i32, dy: i32| match class {
                0 => (dx == 0 || dy == 0) && dx.abs().max(dy.abs()) <= radius,
                1 => dx * dx + dy * dy <= radius * radius + 1,
                _ => dx.abs().max(dy.abs()) == radius,
            };
            let color = [60 + i * 3 % 190, 60 + i * 11 % 190, 60 + i * 17 % 190].map(|value| value as u8);
            let pixel = |at: i32| if inside(at % 16 - x, at / 16 - y) { color } else { [20, 20, 20] };
            let pixels: Vec<u8> = (0..256).flat_map(pixel).collect();
            std::fs::write(folder.join(name).join(format!("{i}.ppm")), [&b"P6 16 16 255\n"[..], &pixels].concat())?;
        }
    }
    Ok(())
}

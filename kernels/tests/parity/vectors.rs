//! Operations against the oracle's vectors.

use deepinfer_kernels::{Backend, Cpu, Reference, SimdLevel};
use safetensors::SafeTensors;

use crate::harness::{Values, floats, upload, upload_in_place};

fn numbers(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).expect("the vector holds this tensor").data().to_vec();
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Rotates as the model does: the angle is the float32 product of position and frequency.
fn rotates_as_the_oracle<B: Backend>(backend: &B) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/golden/vectors/rope_real.safetensors");
    let file = std::fs::read(path).expect("the golden vectors are in the repository");
    let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
    let x = numbers(&tensors, "x");
    // The positions are stored as integers of the same size.
    let positions: Vec<i32> = numbers(&tensors, "positions").iter().map(|v| v.to_bits() as i32).collect();
    let rows = positions.len();
    for (frequencies, rotated, inverse) in [
        ("freqs_swa", "rotated_swa", false),
        ("freqs_compressed", "rotated_compressed", false),
        ("freqs_compressed", "rotated_compressed_inverse", true),
    ] {
        let frequencies = numbers(&tensors, frequencies);
        let rd = 2 * frequencies.len();
        let mut cos_sin = Vec::new();
        for &position in &positions {
            let angles: Vec<f64> = frequencies.iter().map(|f| f64::from(position as f32 * f)).collect();
            cos_sin.extend(angles.iter().map(|a| a.cos() as f32));
            cos_sin.extend(angles.iter().map(|a| a.sin() as f32));
        }
        let mut buffer = upload_in_place(backend, &x);
        let table = upload(backend, &cos_sin);
        backend.rope(&mut buffer, rows, 2, x.len() / rows / 2, rd, &table, inverse);
        let Values::F32(got) = floats(backend, "x", &buffer).values else {
            panic!("floats give floats");
        };
        for (i, (got, want)) in got.iter().zip(numbers(&tensors, rotated)).enumerate() {
            assert!(
                (got - want).abs() <= 1e-5,
                "{rotated}[{i}] on {}: {got} instead of {want}",
                backend.name()
            );
        }
    }
}

#[test]
fn rope_rotates_as_the_oracle_does_up_to_a_million_positions() {
    rotates_as_the_oracle(&Reference);
    for level in SimdLevel::available() {
        rotates_as_the_oracle(&Cpu::with_level(2, level).expect("an available level"));
    }
}

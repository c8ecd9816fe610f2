//! Devices and their attributes.

use crate::driver::config;
use crate::driver::context::Context;
use std::sync::Arc;
use std::time::Instant;

pub struct Device {
    pub ordinal: u32,
    /// The device's number in the machine; the ordinal counts only visible devices.
    pub card: u32,
    pub uuid: [u8; 16],
    pub primary: Arc<Context>,
    pub started: Instant,
}

pub const SHARED_PER_BLOCK: u32 = 48 << 10;
pub const SHARED_OPTIN: u32 = 64 << 10;
pub const THREADS_PER_SM: u32 = 1024;
pub const BLOCKS_PER_SM: u32 = 16;

/// Returns a UUID that is recognisable, valid as a random UUID, and equal in every process.
pub fn uuid(ordinal: u32) -> [u8; 16] {
    let mut uuid = *b"simgpu\x40\x00\x80\x00gpu-00";
    uuid[15] = ordinal as u8;
    uuid
}

/// Returns a device's UUID in the text form of `nvidia-smi`.
pub fn uuid_text(ordinal: u32) -> String {
    let hex: String = uuid(ordinal).iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

pub fn pci_id(ordinal: u32) -> String {
    format!("0000:{:02X}:00.0", ordinal + 1)
}

impl Device {
    pub fn new(ordinal: u32, card: u32, primary: Arc<Context>) -> Device {
        Device { ordinal, card, uuid: uuid(card), primary, started: Instant::now() }
    }

    pub fn pci_bus(&self) -> u32 {
        self.card + 1
    }

    pub fn pci_id(&self) -> String {
        pci_id(self.card)
    }

    /// Returns an attribute's value; `None` if the attribute does not exist.
    #[expect(clippy::too_many_lines, reason = "one `match` over the attributes")]
    pub fn attribute(&self, id: u32) -> Option<i32> {
        let c = config();
        Some(match id {
            1 => 1024,
            2 | 3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => SHARED_PER_BLOCK as i32,
            9 => 65536,
            10 => 32,
            11 => i32::MAX,
            12 => 65536,
            13 => 1_590_000,
            14 => 512,
            15 => 1,
            16 => c.sms as i32,
            17 | 18 => 0,
            19 => 1,
            20 => c.compute_mode as i32,
            21 | 22 => 131_072,
            23 => 65536,
            24..=26 => 16384,
            27 | 28 => 32768,
            29 => 2048,
            30 => 512,
            31 => 1,
            32 => 0,
            33 => self.pci_bus() as i32,
            34 => 0,
            35 => 0,
            36 => 5_001_000,
            37 => 256,
            38 => 4 << 20,
            39 => THREADS_PER_SM as i32,
            40 => 3,
            41 => 1,
            42 => 32768,
            43 => 2048,
            44 => 1,
            45 | 46 => 32768,
            47 | 48 => 8192,
            49 => 32768,
            50 => 0,
            51 => 32,
            52 | 53 => 32768,
            54 => 2046,
            55 | 61 => 32768,
            56 => 131_072,
            57 => 65536,
            58..=60 => 16384,
            62 => 2048,
            63 | 64 | 66 | 67 => 32768,
            65 => 2048,
            68 => 2046,
            69 => 268_435_456,
            70 => 131_072,
            71 => 65000,
            72 => 2_097_120,
            73 | 74 => 32768,
            75 => 7,
            76 => 5,
            77 => 32768,
            78..=80 => 1,
            81 => SHARED_OPTIN as i32,
            82 => 65536,
            83 => 1,
            84 => 0,
            85 => self.ordinal as i32,
            86 => 0,
            87 => 32,
            88 => i32::from(c.pageable_access),
            89 => i32::from(c.concurrent_managed),
            90 => 1,
            91 => 1,
            92..=94 => 0,
            95 => 1,
            96 => 0,
            97 => SHARED_OPTIN as i32,
            98 => 1,
            99 => 1,
            100 | 101 => 0,
            102 => 1,
            103 => i32::from(c.export_memory),
            104 | 105 => 0,
            106 => BLOCKS_PER_SM as i32,
            107..=110 => 0,
            111 => 0,
            112 => 0,
            113 => 0,
            114 => 0,
            115 => 1,
            116 | 117 => 0,
            118 => 0,
            119 => i32::from(c.export_memory),
            120 | 121 => 0,
            122 | 123 => 1,
            124 => 0,
            125 => i32::from(config().export_memory),
            126 => 1,
            127 | 128 => 0,
            129 => 0,
            130 | 131 | 134 => {
                if id == 130 {
                    0
                } else {
                    -1
                }
            }
            132 => 0,
            133 => crate::driver::checkpoint::under_mps().into(),
            135..=138 => 0,
            139 => 0x1eb8_10de,
            140 => 0,
            141..=161 => 0,
            _ => return None,
        })
    }
}

//! How a struct of launch parameters is declared once, for Rust and for the header that CUDA reads.

/// A type that parameters are made of.
pub(crate) trait DeviceType {
    const CUDA_TYPE: &'static str;

    /// Elements of an array.
    const COUNT: Option<usize> = None;

    /// Appends its values, each as a word.
    fn words(&self, words: &mut Vec<u64>);
}

macro_rules! device_types {
    ($($rust:ty => $cuda:literal, $word:expr);+ $(;)?) => {
        $(impl DeviceType for $rust {
            const CUDA_TYPE: &'static str = $cuda;

            fn words(&self, words: &mut Vec<u64>) {
                let word: fn($rust) -> u64 = $word;
                words.push(word(*self));
            }
        })+
    };
}

/// Device addresses, by the CUDA type of the pointer.
macro_rules! pointers {
    ($($(#[doc = $doc:literal])+ $rust:ident => $cuda:literal),+ $(,)?) => {
        $(
            $(#[doc = $doc])+
            #[doc = concat!("`", $cuda, "` in CUDA; 0 is null.")]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
            #[repr(transparent)]
            pub struct $rust(pub u64);

            device_types! { $rust => $cuda, |own| own.0 }
        )+
    };
}

pointers! {
    /// A pointer that a kernel reads through,
    ConstPtr => "const void*",
    /// A pointer that a kernel writes through,
    MutPtr => "void*",
    /// A pointer to f32 that a kernel writes through,
    MutF32Ptr => "float*",
    /// A pointer to f32 that a kernel reads through,
    ConstF32Ptr => "const float*",
    /// A pointer to 32-bit counters,
    MutU32Ptr => "unsigned*",
    /// A pointer to 32-bit integers that a kernel reads through,
    ConstI32Ptr => "const int*",
    /// A pointer to 32-bit integers that a kernel writes through,
    MutI32Ptr => "int*",
}

device_types! {
    u32 => "unsigned", |own| own.into();
    i32 => "int", |own| own as u64;
    i64 => "long long", |own| own as u64;
    f32 => "float", |own| own.to_bits().into();
}

impl<T: DeviceType, const N: usize> DeviceType for [T; N] {
    const CUDA_TYPE: &'static str = T::CUDA_TYPE;
    const COUNT: Option<usize> = Some(N);

    fn words(&self, words: &mut Vec<u64>) {
        self.iter().for_each(|element| element.words(words));
    }
}

/// One field of a parameter struct.
pub(crate) struct ParamField {
    pub name: &'static str,
    pub cuda_type: &'static str,
    /// Elements of an array.
    pub count: Option<usize>,
    pub offset: usize,
    pub doc: &'static [&'static str],
}

/// A parameter struct as a header declares it.
pub(crate) struct ParamStruct {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    pub doc: &'static [&'static str],
    pub fields: Vec<ParamField>,
}

macro_rules! param_struct {
    ($(#[doc = $doc:literal])+ pub struct $name:ident {
        $($(#[doc = $field_doc:literal])+ pub $field:ident: $type:ty,)+
    }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C)]
        pub struct $name {
            $($(#[doc = $field_doc])+ pub $field: $type,)+
        }

        impl DeviceType for $name {
            const CUDA_TYPE: &'static str = stringify!($name);

            fn words(&self, words: &mut Vec<u64>) {
                $(self.$field.words(words);)+
            }
        }

        impl $name {
            pub(crate) fn declaration() -> ParamStruct {
                ParamStruct {
                    name: stringify!($name),
                    size: size_of::<$name>(),
                    align: align_of::<$name>(),
                    doc: &[$($doc),+],
                    fields: vec![$(ParamField {
                        name: stringify!($field),
                        cuda_type: <$type as DeviceType>::CUDA_TYPE,
                        count: <$type as DeviceType>::COUNT,
                        offset: std::mem::offset_of!($name, $field),
                        doc: &[$($field_doc),+],
                    }),+],
                }
            }
        }
    };
}

pub(crate) use param_struct;

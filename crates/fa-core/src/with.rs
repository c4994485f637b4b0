//! Methods that set one field of a value.

/// Methods `with_FIELD`, which replace a field of plain data. Other crates build such data with them: the
/// types are `#[non_exhaustive]`, so that a further field changes no code that does not name it.
#[doc(hidden)]
#[macro_export]
macro_rules! with_methods {
    ($($method:ident($field:ident: $type:ty)),+ $(,)?) => {
        $(
            #[doc = concat!("The same with another `", stringify!($field), "`.")]
            #[must_use]
            pub const fn $method(mut self, $field: $type) -> Self {
                self.$field = $field;
                self
            }
        )+
    };
}

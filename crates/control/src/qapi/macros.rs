//! Macros that define a QAPI type in one place: its Rust type, its parser, its writer and its description.

/// Defines an object with these members.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$member_doc:meta])* $field:ident: $type:ty = $member:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$member_doc])* pub $field: $type,)*
        }

        impl $crate::qapi::Record for $name {
            const NAME: &'static str = stringify!($name);

            fn object(_schema: &mut $crate::qapi::Schema) -> $crate::qapi::Object {
                $crate::qapi::Object {
                    members: vec![$(_schema.member::<$type>($member)),*],
                    variants: None,
                }
            }

            fn take_members(_fields: &mut $crate::qapi::Fields<'_>) -> Result<Self, $crate::CommandError> {
                Ok(Self { $($field: $crate::qapi::Member::take(_fields, $member)?,)* })
            }

            fn put_members(&self, _map: &mut serde_json::Map<String, serde_json::Value>) {
                $($crate::qapi::Member::put(&self.$field, $member, _map);)*
            }
        }
    };
}

/// Defines an object in which one member, the tag, decides which other members it has.
macro_rules! union {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$member_doc:meta])* $field:ident: $type:ty = $member:literal,)* }
        $(#[$tag_doc:meta])* $tag_field:ident: $tag:ident = $tag_member:literal {
            $($(#[$case_doc:meta])* $case:ident($branch:ty) = $word:literal,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$member_doc])* pub $field: $type,)*
            $(#[$tag_doc])*
            pub $tag_field: $tag,
        }

        $(#[$tag_doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub enum $tag {
            $($(#[$case_doc])* $case($branch),)+
        }

        impl $tag {
            /// The value of the tag.
            pub fn word(&self) -> &'static str {
                match self {
                    $(Self::$case(_) => $word,)+
                }
            }
        }

        impl $crate::qapi::Record for $name {
            const NAME: &'static str = stringify!($name);

            fn object(schema: &mut $crate::qapi::Schema) -> $crate::qapi::Object {
                let tag = schema.define_words(stringify!($tag), &[$($word),+]);
                let members = vec![
                    serde_json::json!({ "name": $tag_member, "type": tag }),
                    $(schema.member::<$type>($member)),*
                ];
                let variants = vec![
                    $(serde_json::json!({ "case": $word, "type": schema.define_record::<$branch>() })),+
                ];
                let variants = Some(($tag_member, variants));
                $crate::qapi::Object { members, variants }
            }

            fn take_members(fields: &mut $crate::qapi::Fields<'_>) -> Result<Self, $crate::CommandError> {
                let case = fields.take_case($tag_member, &[$($word),+])?;
                $(let $field = $crate::qapi::Member::take(fields, $member)?;)*
                type Take = fn(&mut $crate::qapi::Fields<'_>) -> Result<$tag, $crate::CommandError>;
                let branches: &[Take] = &[
                    $(|fields| <$branch as $crate::qapi::Record>::take_members(fields).map($tag::$case)),+
                ];
                Ok(Self { $($field,)* $tag_field: branches[case](fields)? })
            }

            fn put_members(&self, map: &mut serde_json::Map<String, serde_json::Value>) {
                map.insert($tag_member.into(), self.$tag_field.word().into());
                $($crate::qapi::Member::put(&self.$field, $member, map);)*
                match &self.$tag_field {
                    $($tag::$case(branch) => $crate::qapi::Record::put_members(branch, map),)+
                }
            }
        }
    };
}

/// Defines an enumeration whose values are words.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        words_of! { $name as $name { $($value = $word,)+ } }
    };
}

/// Implements `Qapi`, under its QAPI name, for an enumeration that is defined elsewhere.
macro_rules! words_of {
    ($type:ty as $qapi:ident { $($value:ident = $word:literal,)+ }) => {
        impl $crate::qapi::Qapi for $type {
            fn describe(schema: &mut $crate::qapi::Schema) -> String {
                schema.define_words(stringify!($qapi), &[$($word),+])
            }

            fn from_json(
                value: serde_json::Value,
                at: &$crate::qapi::ArgumentPath<'_>,
            ) -> Result<Self, $crate::CommandError> {
                let word = String::from_json(value, at)?;
                let index = $crate::qapi::word_index(&word, &[$($word),+], at)?;
                Ok([$(Self::$value),+][index])
            }

            fn to_json(&self) -> serde_json::Value {
                match self {
                    $(Self::$value => $word.into(),)+
                }
            }
        }
    };
}

/// Defines a value that has one of several types, which its JSON type selects.
macro_rules! alternate {
    ($(#[$doc:meta])* $name:ident = $qapi:literal {
        $($(#[$case_doc:meta])* $case:ident($type:ty) if $is:ident,)+
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub enum $name {
            $($(#[$case_doc])* $case($type),)+
        }

        impl $crate::qapi::Qapi for $name {
            fn describe(schema: &mut $crate::qapi::Schema) -> String {
                schema.define($qapi, |schema| {
                    let types = [$(<$type as $crate::qapi::Qapi>::describe(schema)),+];
                    let members: Vec<_> = types.iter().map(|name| serde_json::json!({ "type": name })).collect();
                    serde_json::json!({ "meta-type": "alternate", "members": members })
                })
            }

            fn from_json(
                value: serde_json::Value,
                at: &$crate::qapi::ArgumentPath<'_>,
            ) -> Result<Self, $crate::CommandError> {
                $(if value.$is() {
                    return <$type as $crate::qapi::Qapi>::from_json(value, at).map(Self::$case);
                })+
                Err(at.expected($qapi))
            }

            fn to_json(&self) -> serde_json::Value {
                match self {
                    $(Self::$case(value) => value.to_json(),)+
                }
            }
        }
    };
}

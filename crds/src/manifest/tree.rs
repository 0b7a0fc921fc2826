//! YAML text as a tree of nodes with positions.
//! Invariants: depth and size are bounded while reading, before anything is expanded; shared nodes are
//! shared, so an alias costs nothing until it is written out, and that cost is known.

use std::collections::BTreeMap;
use std::sync::Arc;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};

use super::{DEPTH_MAX, DOCUMENTS_MAX, ManifestError, VALUES_MAX};

/// A place in a text. Lines and columns count from 1; 0 stands for "nowhere".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

impl Position {
    fn of(span: Span) -> Self {
        Self { line: span.start.line(), column: span.start.col() + 1 }
    }
}

/// A node and where it stands.
#[derive(Debug)]
pub struct Node {
    pub at: Position,
    pub content: Content,
    /// Nodes below and including this one, aliases followed.
    weight: usize,
    /// Levels below this one.
    height: usize,
}

#[derive(Debug)]
pub enum Content {
    /// A scalar; `plain` if it may be more than a text.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Arc<Node>>),
    Map(Vec<Entry>),
}

/// A field of a map.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub at: Position,
    pub value: Arc<Node>,
}

impl Node {
    pub fn is_map(&self) -> bool {
        matches!(self.content, Content::Map(_))
    }

    /// Whether the document is empty.
    pub fn is_null(&self) -> bool {
        matches!(&self.content, Content::Scalar { text, plain: true } if super::scalar::is_null(text))
    }

    /// The text of a field of a map.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        let Content::Map(entries) = &self.content else { return None };
        match &entries.iter().find(|e| e.name == name)?.value.content {
            Content::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }
}

/// All documents of a text, and what is wrong with it beside its grammar.
pub struct Tree {
    pub documents: Vec<Arc<Node>>,
    pub errors: Vec<ManifestError>,
}

/// Reads a text. Errors: bad grammar, too deep, too large.
pub fn read(text: &str) -> Result<Tree, ManifestError> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| {
            let at = Position { line: e.marker().line(), column: e.marker().col() + 1 };
            ManifestError::at(at, "", format!("not YAML: {}", e.info()))
        })?;
        builder.event(event, Position::of(span))?;
    }
    Ok(Tree { documents: builder.documents, errors: builder.errors })
}

#[derive(Default)]
struct Builder {
    documents: Vec<Arc<Node>>,
    errors: Vec<ManifestError>,
    open: Vec<Open>,
    anchors: BTreeMap<usize, Arc<Node>>,
    /// Nodes of all documents, aliases followed.
    weight: usize,
}

/// A list or map that has begun.
struct Open {
    at: Position,
    anchor: usize,
    items: Vec<Arc<Node>>,
    entries: Vec<Entry>,
    /// Line of each name in `entries`.
    names: BTreeMap<String, usize>,
    /// The key that waits for its value.
    key: Option<(String, Position)>,
    is_map: bool,
}

impl Builder {
    fn event(&mut self, event: Event<'_>, at: Position) -> Result<(), ManifestError> {
        match event {
            Event::DocumentStart(_) => {
                self.anchors.clear();
                if self.documents.len() >= DOCUMENTS_MAX {
                    let message = format!("the file has more than {DOCUMENTS_MAX} documents");
                    return Err(ManifestError::at(at, "", message));
                }
            }
            Event::Scalar(text, style, anchor, tag) => {
                let plain = self.is_plain(style, tag.as_deref(), at);
                self.add(Content::Scalar { text: text.into_owned(), plain }, anchor, at)?;
            }
            Event::SequenceStart(anchor, tag) => self.begin(false, anchor, tag.as_deref(), at)?,
            Event::MappingStart(anchor, tag) => self.begin(true, anchor, tag.as_deref(), at)?,
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(done) = self.open.pop() else { return Ok(()) };
                let content =
                    if done.is_map { Content::Map(done.entries) } else { Content::List(done.items) };
                self.add(content, done.anchor, done.at)?;
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return Err(ManifestError::at(
                        at,
                        "",
                        "an alias inside its own anchor: write the value out",
                    ));
                };
                self.grow(node.weight, at)?;
                self.place(node, at)?;
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn begin(
        &mut self,
        is_map: bool,
        anchor: usize,
        tag: Option<&Tag>,
        at: Position,
    ) -> Result<(), ManifestError> {
        if self.open.len() >= DEPTH_MAX {
            return Err(ManifestError::at(at, "", format!("nested more than {DEPTH_MAX} levels deep")));
        }
        if tag.is_some_and(|t| !t.is_yaml_core_schema()) {
            self.errors.push(ManifestError::at(at, "", "tags are not known here: remove the !"));
        }
        self.open.push(Open {
            at,
            anchor,
            items: Vec::new(),
            entries: Vec::new(),
            names: BTreeMap::new(),
            key: None,
            is_map,
        });
        Ok(())
    }

    /// Whether a scalar may be more than a text.
    fn is_plain(&mut self, style: ScalarStyle, tag: Option<&Tag>, at: Position) -> bool {
        match tag {
            None => style == ScalarStyle::Plain,
            Some(tag) if tag.is_yaml_core_schema() && tag.suffix == "str" => false,
            // `!` alone also says text.
            Some(tag) if tag.handle.is_empty() && tag.suffix == "!" => false,
            Some(tag) if tag.is_yaml_core_schema() && tag.suffix != "binary" => true,
            Some(_) => {
                self.errors.push(ManifestError::at(at, "", "tags are not known here: remove the !"));
                false
            }
        }
    }

    fn grow(&mut self, by: usize, at: Position) -> Result<(), ManifestError> {
        self.weight = self.weight.saturating_add(by);
        if self.weight > VALUES_MAX {
            let message = format!("more than {VALUES_MAX} values once aliases are followed");
            return Err(ManifestError::at(at, "", message));
        }
        Ok(())
    }

    fn add(&mut self, content: Content, anchor: usize, at: Position) -> Result<(), ManifestError> {
        let below: Vec<&Arc<Node>> = match &content {
            Content::Scalar { .. } => Vec::new(),
            Content::List(items) => items.iter().collect(),
            Content::Map(entries) => entries.iter().map(|e| &e.value).collect(),
        };
        let weight = below.iter().fold(1, |sum: usize, n| sum.saturating_add(n.weight));
        let height = below.iter().map(|n| n.height + 1).max().unwrap_or(0);
        let node = Arc::new(Node { at, content, weight, height });
        self.grow(1, at)?;
        if anchor > 0 {
            self.anchors.insert(anchor, Arc::clone(&node));
        }
        self.place(node, at)
    }

    /// Puts a finished node where it belongs.
    fn place(&mut self, node: Arc<Node>, at: Position) -> Result<(), ManifestError> {
        if self.open.len() + node.height > DEPTH_MAX {
            return Err(ManifestError::at(at, "", format!("nested more than {DEPTH_MAX} levels deep")));
        }
        let Some(open) = self.open.last_mut() else {
            self.documents.push(node);
            return Ok(());
        };
        if !open.is_map {
            open.items.push(node);
            return Ok(());
        }
        match open.key.take() {
            None => {
                let Content::Scalar { text, .. } = &node.content else {
                    return Err(ManifestError::at(
                        at,
                        "",
                        "the name of a field must be a word, not a list or map",
                    ));
                };
                open.key = Some((text.clone(), at));
            }
            Some((name, key_at)) => self.field(name, key_at, node)?,
        }
        Ok(())
    }

    fn field(&mut self, name: String, at: Position, value: Arc<Node>) -> Result<(), ManifestError> {
        let Some(open) = self.open.last_mut() else { return Ok(()) };
        if name == "<<" {
            let message = "merge keys are not known here: write the fields out";
            self.errors.push(ManifestError::at(at, "", message));
        } else if let Some(first) = open.names.get(&name) {
            let message = format!("the field {name} is there twice (first in line {first}): remove one");
            self.errors.push(ManifestError::at(at, "", message));
        } else {
            open.names.insert(name.clone(), at.line);
            open.entries.push(Entry { name, at, value });
        }
        Ok(())
    }
}

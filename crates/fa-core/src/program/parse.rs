//! From tokens to a program.

use std::collections::HashMap;
use std::ops::Range;
use std::str::FromStr;

use super::error::{ProgramError, ProgramProblem, limit};
use super::graph::Graph;
use super::lex::{Token, tokens};
use super::limits::{MAX_ARRAYS, MAX_NESTING, MAX_RANK, MAX_SCALARS};
use super::node::{Binary, Const, NodeId, Unary};
use super::syntax::{FUNCTIONS, Level, UNARY, above, is_reserved};
use super::types::{ArrayDecl, Deps, Element, ScalarDecl, Type, Var};
use super::whole::{Program, Results};

/// What programs may set.
const RESULTS: [&str; 3] = ["mask", "score", "weight"];

/// What a name stands for.
#[derive(Clone, Copy)]
enum Named {
    Let(NodeId),
    Array(usize),
    Scalar(usize),
}

enum Infix {
    Op(Binary),
    Greater,
    GreaterEqual,
    Power,
}

fn infix(token: &Token) -> Option<(Infix, Level)> {
    let text = match token {
        Token::Mark(mark) => *mark,
        Token::Name(name) if name == "or" => "||",
        Token::Name(name) if name == "and" => "&&",
        Token::Name(_) | Token::Int(_) | Token::Float(_) | Token::End => return None,
    };
    Some(match text {
        "||" => (Infix::Op(Binary::Or), Level::Or),
        "&&" => (Infix::Op(Binary::And), Level::And),
        "<" => (Infix::Op(Binary::Lt), Level::Comparison),
        "<=" => (Infix::Op(Binary::Le), Level::Comparison),
        ">" => (Infix::Greater, Level::Comparison),
        ">=" => (Infix::GreaterEqual, Level::Comparison),
        "==" => (Infix::Op(Binary::Eq), Level::Comparison),
        "!=" => (Infix::Op(Binary::Ne), Level::Comparison),
        "|" => (Infix::Op(Binary::Or), Level::BitOr),
        "^" => (Infix::Op(Binary::Xor), Level::BitXor),
        "&" => (Infix::Op(Binary::And), Level::BitAnd),
        "<<" => (Infix::Op(Binary::Shl), Level::Shift),
        ">>" => (Infix::Op(Binary::Shr), Level::Shift),
        "+" => (Infix::Op(Binary::Add), Level::Sum),
        "-" => (Infix::Op(Binary::Sub), Level::Sum),
        "*" => (Infix::Op(Binary::Mul), Level::Product),
        "/" => (Infix::Op(Binary::Div), Level::Product),
        "//" => (Infix::Op(Binary::FloorDiv), Level::Product),
        "%" => (Infix::Op(Binary::FloorMod), Level::Product),
        "**" => (Infix::Power, Level::Power),
        _ => return None,
    })
}

impl Program {
    /// A program from its text.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn parse(text: &str) -> Result<Program, ProgramError> {
        parse(text)
    }
}

impl FromStr for Program {
    type Err = ProgramError;

    fn from_str(text: &str) -> Result<Program, ProgramError> {
        Program::parse(text)
    }
}

fn parse(text: &str) -> Result<Program, ProgramError> {
    let tokens = tokens(text)?;
    let graph = Graph::default();
    let mut parser =
        Parser { text, tokens, at: 0, nesting: 0, graph, names: HashMap::new(), results: Results::default() };
    parser.program()
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(Token, Range<usize>)>,
    at: usize,
    nesting: usize,
    graph: Graph,
    names: HashMap<String, Named>,
    results: Results,
}

type Parsed<T> = Result<T, ProgramError>;

impl Parser<'_> {
    fn program(&mut self) -> Parsed<Program> {
        loop {
            let start = self.span().start;
            if *self.peek() == Token::End {
                break;
            } else if self.takes_mark(";") {
            } else if self.takes_name("array") {
                self.array()?;
            } else if self.takes_name("scalar") {
                self.scalar()?;
            } else if self.takes_name("let") {
                let name = self.new_name()?;
                self.mark("=", "`=`")?;
                let value = self.expression(Level::Or)?;
                self.names.insert(name, Named::Let(value));
                self.end_of_statement()?;
            } else if let Some(result) = RESULTS.into_iter().find(|result| self.sets(result)) {
                let value = self.expression(Level::Or)?;
                self.result(result, value, start)?;
                self.end_of_statement()?;
            } else {
                let value = self.expression(Level::Or)?;
                let result = if self.graph.ty(value) == Type::Bool { "mask" } else { "score" };
                self.result(result, value, start)?;
                self.takes_mark(";");
                if *self.peek() != Token::End {
                    return Err(self.expected("an operator, or the end after the program's result"));
                }
            }
        }
        let Results { mask, score, weight } = self.results;
        if mask.or(score).or(weight).is_none() {
            return Err(self.error(ProgramProblem::NoResult, self.span()));
        }
        let all = 0..self.text.trim_end().len();
        Program::new(&self.graph, self.results).map_err(|problem| self.error(problem, all))
    }

    fn result(&mut self, result: &'static str, value: NodeId, start: usize) -> Parsed<()> {
        let span = start..self.end();
        let needed = if result == "mask" { Type::Bool } else { Type::F32 };
        let value = if needed == Type::F32 { self.promoted(value, &span)? } else { value };
        let given = self.graph.ty(value);
        if given != needed {
            return Err(self.error(ProgramProblem::ResultType { result, needed, given }, span));
        }
        if result != "score" && self.graph.deps[value.index()].has(Deps::SCORE) {
            return Err(self.error(ProgramProblem::ScoreInMask { result }, span));
        }
        let place = match result {
            "mask" => &mut self.results.mask,
            "score" => &mut self.results.score,
            _ => &mut self.results.weight,
        };
        if place.replace(value).is_some() {
            return Err(self.error(ProgramProblem::SetTwice(result), span));
        }
        Ok(())
    }

    /// `NAME: ELEMENT[_, ..] grad aligned;`
    fn array(&mut self) -> Parsed<()> {
        let start = self.span().start;
        let name = self.new_name()?;
        self.mark(":", "`:` and an element type, as in `: f32[_]`")?;
        let span = self.span();
        let given = self.next().shown();
        let element = Element::of_name(given.trim_matches('`')).ok_or_else(|| {
            let what = "an element type: f32, f16, bf16, i32, u8, bool, bits";
            self.error(ProgramProblem::BadType { name: given.trim_matches('`').to_owned(), what }, span)
        })?;
        self.mark("[", "`[_]`, with a `_` for each axis")?;
        let mut rank = 0;
        while !self.takes_mark("]") {
            if rank > 0 {
                self.mark(",", "`,` or `]`")?;
            }
            if !self.takes_name("_") {
                return Err(self.expected("`_` for an axis"));
            }
            rank += 1;
        }
        if rank == 0 || rank > MAX_RANK {
            let span = start..self.end();
            return Err(self.error(ProgramProblem::Axes { given: rank }, span));
        }
        let gradient = self.takes_name("grad");
        if gradient && element.loaded() != Type::F32 {
            let span = start..self.end();
            return Err(self.error(ProgramProblem::GradientOfIntegers, span));
        }
        let aligned = self.takes_name("aligned");
        let given = self.graph.arrays.len() + 1;
        let span = start..self.end();
        limit("arrays", MAX_ARRAYS, given).map_err(|problem| self.error(problem, span))?;
        self.names.insert(name.clone(), Named::Array(given - 1));
        self.graph.arrays.push(ArrayDecl { name, element, rank, gradient, aligned });
        self.end_of_statement()
    }

    /// `NAME: i32;`
    fn scalar(&mut self) -> Parsed<()> {
        let start = self.span().start;
        let name = self.new_name()?;
        self.mark(":", "`:` and a type, as in `: i32`")?;
        let span = self.span();
        let given = self.next().shown();
        let ty = match given.trim_matches('`') {
            "i32" => Type::I32,
            "f32" => Type::F32,
            other => {
                let problem =
                    ProgramProblem::BadType { name: other.to_owned(), what: "a scalar's type: i32 or f32" };
                return Err(self.error(problem, span));
            }
        };
        let given = self.graph.scalars.len() + 1;
        let span = start..self.end();
        limit("scalars", MAX_SCALARS, given).map_err(|problem| self.error(problem, span))?;
        self.names.insert(name.clone(), Named::Scalar(given - 1));
        self.graph.scalars.push(ScalarDecl { name, ty, positive: false });
        self.end_of_statement()
    }

    fn new_name(&mut self) -> Parsed<String> {
        let span = self.span();
        let Token::Name(name) = self.next() else {
            self.at -= 1;
            return Err(self.expected("a name"));
        };
        if is_reserved(&name) || self.names.contains_key(&name) {
            return Err(self.error(ProgramProblem::Taken { name }, span));
        }
        Ok(name)
    }

    /// An expression of operators that bind at least as tightly as `least`.
    fn expression(&mut self, least: Level) -> Parsed<NodeId> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            let problem =
                ProgramProblem::Limit { what: "levels of nesting", most: MAX_NESTING, given: self.nesting };
            return Err(self.error(problem, self.span()));
        }
        let start = self.span().start;
        let mut left = self.signed()?;
        let mut chained: Option<NodeId> = None;
        while let Some((op, level)) = infix(self.peek()).filter(|&(_, level)| level >= least) {
            self.next();
            if matches!(op, Infix::Power) {
                left = self.power(left, Level::Sign, start)?;
                continue;
            }
            let right = self.expression(above(level))?;
            let span = start..self.end();
            // `a < b < c` is `a < b and b < c`.
            let first = if level == Level::Comparison { chained.unwrap_or(left) } else { left };
            let value = self.combined(op, first, right, &span)?;
            if level == Level::Comparison {
                left = if chained.is_some() { self.binary(Binary::And, left, value, &span)? } else { value };
                chained = Some(right);
            } else {
                left = value;
                chained = None;
            }
        }
        self.nesting -= 1;
        Ok(left)
    }

    fn combined(&mut self, op: Infix, a: NodeId, b: NodeId, span: &Range<usize>) -> Parsed<NodeId> {
        let (op, a, b) = match op {
            Infix::Op(op) => (op, a, b),
            Infix::Greater => (Binary::Lt, b, a),
            Infix::GreaterEqual => (Binary::Le, b, a),
            Infix::Power => return Err(self.error(ProgramProblem::Exponent, span.clone())),
        };
        self.binary(op, a, b, span)
    }

    /// An operation; where one operand is f32, an i32 is converted, and `/` always is of f32.
    fn binary(&mut self, op: Binary, a: NodeId, b: NodeId, span: &Range<usize>) -> Parsed<NodeId> {
        let types = [self.graph.ty(a), self.graph.ty(b)];
        let of_integers = matches!(
            op,
            Binary::FloorDiv
                | Binary::FloorMod
                | Binary::Shl
                | Binary::Shr
                | Binary::And
                | Binary::Or
                | Binary::Xor
        );
        let mixed = !of_integers && (types == [Type::F32, Type::I32] || types == [Type::I32, Type::F32]);
        let (a, b) = if mixed || (op == Binary::Div && types == [Type::I32; 2]) {
            (self.promoted(a, span)?, self.promoted(b, span)?)
        } else {
            (a, b)
        };
        let made = self.graph.binary(op, a, b);
        self.made(made, span)
    }

    /// An i32 as f32.
    fn promoted(&mut self, x: NodeId, span: &Range<usize>) -> Parsed<NodeId> {
        if self.graph.ty(x) != Type::I32 {
            return Ok(x);
        }
        let made = self.graph.unary(Unary::ToF32, x);
        self.made(made, span)
    }

    /// `base`, which begins at `start`, to the constant exponent that comes next, of operators from `level`
    /// on.
    fn power(&mut self, base: NodeId, level: Level, start: usize) -> Parsed<NodeId> {
        let exponent = self.expression(level)?;
        let span = start..self.end();
        let exponent = match self.graph.constant(exponent) {
            Some(Const::I32(value)) => value as f32,
            Some(Const::F32(bits)) => f32::from_bits(bits),
            Some(Const::Bool(_)) | None => return Err(self.error(ProgramProblem::Exponent, span)),
        };
        let base = self.promoted(base, &span)?;
        let made = self.graph.power(base, exponent);
        self.made(made, &span)
    }

    /// An operand with its signs, which bind less tightly than `**`.
    fn signed(&mut self) -> Parsed<NodeId> {
        let start = self.span().start;
        let (op, operand) = match self.peek() {
            Token::Mark("-") => (Some(Unary::Neg), Level::Sign),
            Token::Mark("+") => (None, Level::Sign),
            Token::Mark("~" | "!") => (Some(Unary::Not), Level::Sign),
            Token::Name(name) if name == "not" => (Some(Unary::Not), Level::Not),
            Token::Name(_) | Token::Int(_) | Token::Float(_) | Token::Mark(_) | Token::End => {
                return self.operand();
            }
        };
        self.next();
        // The negative of 2^31 is an integer, 2^31 is not.
        if let (Some(Unary::Neg), &Token::Int(value)) = (op, self.peek()) {
            let power = self.tokens.get(self.at + 1).is_some_and(|(token, _)| *token == Token::Mark("**"));
            if !power && let Ok(value) = i32::try_from(-value) {
                self.next();
                let made = self.graph.int(value);
                return self.made(made, &(start..self.end()));
            }
        }
        let x = self.expression(operand)?;
        let span = start..self.end();
        let Some(op) = op else { return Ok(x) };
        let made = self.graph.unary(op, x);
        self.made(made, &span)
    }

    fn operand(&mut self) -> Parsed<NodeId> {
        let span = self.span();
        match self.next() {
            Token::Int(value) => {
                let value = i32::try_from(value)
                    .map_err(|_| self.error(ProgramProblem::Number(Type::I32), span.clone()))?;
                let made = self.graph.int(value);
                self.made(made, &span)
            }
            Token::Float(value) => {
                let made = self.graph.float(value);
                self.made(made, &span)
            }
            Token::Mark("(") => {
                let inner = self.expression(Level::Or)?;
                self.mark(")", "an operator or `)`")?;
                Ok(inner)
            }
            Token::Name(name) => self.name(&name, span),
            Token::Mark(_) | Token::End => {
                self.at -= 1;
                Err(self.expected("an expression"))
            }
        }
    }

    fn name(&mut self, name: &str, span: Range<usize>) -> Parsed<NodeId> {
        if *self.peek() == Token::Mark("(") {
            return self.call(name, span);
        }
        let made = match (name, self.names.get(name)) {
            ("true", _) => self.graph.boolean(true),
            ("false", _) => self.graph.boolean(false),
            ("inf", _) => self.graph.float(f32::INFINITY),
            ("nan", _) => self.graph.float(f32::NAN),
            (_, Some(&Named::Let(node))) => Ok(node),
            (_, Some(&Named::Scalar(scalar))) => self.graph.scalar(scalar),
            (_, Some(&Named::Array(array))) => return self.load(array, span),
            (_, None) => match Var::ALL.into_iter().find(|var| var.name() == name) {
                Some(var) => self.graph.var(var),
                None if is_reserved(name) => {
                    self.at -= 1;
                    return Err(self.expected("an expression"));
                }
                None => Err(ProgramProblem::UnknownName { name: name.to_owned() }),
            },
        };
        self.made(made, &span)
    }

    fn load(&mut self, array: usize, span: Range<usize>) -> Parsed<NodeId> {
        self.mark("[", "`[` and the indices of the array")?;
        let mut indices = Vec::new();
        while !self.takes_mark("]") {
            if !indices.is_empty() {
                self.mark(",", "`,` or `]`")?;
            }
            indices.push(self.expression(Level::Or)?);
        }
        let made = self.graph.load(array, &indices);
        self.made(made, &(span.start..self.end()))
    }

    fn call(&mut self, function: &str, span: Range<usize>) -> Parsed<NodeId> {
        let one = UNARY.into_iter().find(|op| op.name() == function);
        let takes = match function {
            _ if one.is_some() => 1,
            "min" | "max" | "pow" => 2,
            "clamp" | "select" | "where" => 3,
            _ => {
                let problem = match self.names.get(function) {
                    Some(Named::Array(_)) => {
                        return Err(self.expected("`[` and the indices of the array"));
                    }
                    Some(Named::Let(_) | Named::Scalar(_)) | None => {
                        ProgramProblem::UnknownFunction { name: function.to_owned(), functions: FUNCTIONS }
                    }
                };
                return Err(self.error(problem, span));
            }
        };
        self.mark("(", "`(`")?;
        if function == "pow" {
            let base = self.expression(Level::Or)?;
            self.mark(",", "`,` and the exponent")?;
            let power = self.power(base, Level::Or, span.start)?;
            self.mark(")", "`)`")?;
            return Ok(power);
        }
        let mut arguments = Vec::new();
        while !self.takes_mark(")") {
            if !arguments.is_empty() {
                self.mark(",", "`,` or `)`")?;
            }
            arguments.push(self.expression(Level::Or)?);
        }
        let span = span.start..self.end();
        if arguments.len() != takes {
            let (function, given) = (function.to_owned(), arguments.len());
            return Err(self.error(ProgramProblem::Arguments { function, takes, given }, span));
        }
        match (function, &arguments[..]) {
            ("min", &[a, b]) => self.binary(Binary::Min, a, b, &span),
            ("max", &[a, b]) => self.binary(Binary::Max, a, b, &span),
            ("clamp", &[x, low, high]) => {
                let low = self.binary(Binary::Max, x, low, &span)?;
                self.binary(Binary::Min, low, high, &span)
            }
            ("select" | "where", &[condition, yes, no]) => {
                let mixed = self.graph.ty(yes) != self.graph.ty(no);
                let (yes, no) =
                    if mixed { (self.promoted(yes, &span)?, self.promoted(no, &span)?) } else { (yes, no) };
                let made = self.graph.select(condition, yes, no);
                self.made(made, &span)
            }
            _ => {
                let op = one.unwrap_or(Unary::Abs);
                let takes_both = matches!(op, Unary::Abs | Unary::ToF32 | Unary::ToI32);
                let x = if takes_both { arguments[0] } else { self.promoted(arguments[0], &span)? };
                let made = self.graph.unary(op, x);
                self.made(made, &span)
            }
        }
    }

    fn made(&self, made: Result<NodeId, ProgramProblem>, span: &Range<usize>) -> Parsed<NodeId> {
        made.map_err(|problem| self.error(problem, span.clone()))
    }

    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn next(&mut self) -> Token {
        let token = self.tokens[self.at].0.clone();
        // The end stays.
        self.at += 1;
        if self.at == self.tokens.len() {
            self.tokens.push((Token::End, self.text.len()..self.text.len()));
        }
        token
    }

    fn span(&self) -> Range<usize> {
        self.tokens[self.at].1.clone()
    }

    /// The end of the token before this.
    fn end(&self) -> usize {
        self.at.checked_sub(1).map_or(0, |before| self.tokens[before].1.end)
    }

    fn takes_mark(&mut self, mark: &str) -> bool {
        let there = matches!(self.peek(), Token::Mark(own) if *own == mark);
        self.at += usize::from(there);
        there
    }

    fn takes_name(&mut self, name: &str) -> bool {
        let there = matches!(self.peek(), Token::Name(own) if own == name);
        self.at += usize::from(there);
        there
    }

    /// Takes `NAME =`, if it is there.
    fn sets(&mut self, name: &str) -> bool {
        let next = self.tokens.get(self.at + 1).map(|(token, _)| token);
        let there = matches!(self.peek(), Token::Name(own) if own == name) && next == Some(&Token::Mark("="));
        self.at += if there { 2 } else { 0 };
        there
    }

    fn mark(&mut self, mark: &str, expected: &'static str) -> Parsed<()> {
        if self.takes_mark(mark) { Ok(()) } else { Err(self.expected(expected)) }
    }

    /// A `;`, which may be left out at the end.
    fn end_of_statement(&mut self) -> Parsed<()> {
        if *self.peek() == Token::End { Ok(()) } else { self.mark(";", "an operator or `;`") }
    }

    fn expected(&self, expected: &'static str) -> ProgramError {
        self.error(ProgramProblem::Syntax { expected, found: self.peek().shown() }, self.span())
    }

    fn error(&self, problem: ProgramProblem, span: Range<usize>) -> ProgramError {
        ProgramError::new(problem, self.text, span)
    }
}

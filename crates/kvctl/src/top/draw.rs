//! The screen of `top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Table, TableState};

use crate::size::compact;
use crate::top::bar::{Bar, PARTS};
use crate::top::state::{Edit, State, Term};
use crate::view::{Budget, Instance, Snapshot};

const KEYS: &str = "↑↓ select   l limit   m minimum   q quit";
const KEYS_OF_EDIT: &str = "Enter ask   Esc leave it   sizes: 512M, 1.5GiB";
const NUMBERS: [&str; 6] = ["USED", "CACHED", "RESERVED", "LIMIT", "MIN", "SHORT"];
/// `1023.99G`
const NUMBER_WIDTH: u16 = 8;
const MAX_NAME_WIDTH: usize = 24;
const MIN_BAR_WIDTH: u16 = 6;
/// Of `GPU-5f0c9a1e-...`: enough to tell the GPUs of one host apart.
const DEVICE_WIDTH: usize = 12;

pub(crate) fn screen(frame: &mut Frame<'_>, state: &State) {
    let gpus = u16::try_from(state.snapshot.budgets.len()).unwrap_or(u16::MAX);
    let gap = u16::from(gpus > 0);
    let [title, budgets, _, instances, detail, message, keys] = frame.area().layout(&Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(gpus.min(frame.area().height / 2)),
        Constraint::Length(gap),
        Constraint::Fill(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
    ]));
    frame.render_widget(legend(state.colours), title);
    let rows = budgets.rows();
    for (row, budget) in rows.zip(&state.snapshot.budgets) {
        frame.render_widget(budget_line(budget, state, row.width), row);
    }
    draw_instances(frame, instances, state);
    frame.render_widget(detail_line(state), detail);
    frame.render_widget(message_line(state), message);
    frame.render_widget(help_line(state), keys);
}

fn legend(colours: bool) -> Line<'static> {
    let mut line = Line::from(Span::styled("kvcached", Modifier::BOLD));
    for part in PARTS {
        line.push_span("   ");
        line.push_span(Span::styled(part.shade(), part.style(colours)));
        line.push_span(format!(" {}", part.word()));
    }
    line
}

fn budget_line(budget: &Budget, state: &State, width: u16) -> Line<'static> {
    let device: String = budget.device.chars().take(DEVICE_WIDTH).collect();
    let figures = format!(
        "  {:>NUMBER$} of {:>NUMBER$}, {:>NUMBER$} free",
        compact(budget.granted_bytes),
        compact(budget.budget_bytes),
        compact(budget.free_bytes),
        NUMBER = usize::from(NUMBER_WIDTH),
    );
    let short = match budget.shortage_bytes {
        0 => String::new(),
        bytes => format!(", {} short", compact(bytes)),
    };
    // Room for a shortage is always left, so that bars do not jump.
    let texts_width = DEVICE_WIDTH + 1 + figures.chars().count() + ", 1023.99G short".len();
    let bar_width = usize::from(width).saturating_sub(texts_width);
    let mut line = Line::from(format!("{device:<DEVICE_WIDTH$} "));
    let bar_width = u16::try_from(bar_width).unwrap_or(u16::MAX).max(MIN_BAR_WIDTH);
    line.extend(bar_of_budget(budget, &state.snapshot).line(bar_width, state.colours));
    line.push_span(figures);
    line.push_span(Span::styled(short, alarm(state.colours)));
    line
}

/// What is granted beyond what its instances use is kept by them for the next block, wherever.
fn bar_of_budget(budget: &Budget, snapshot: &Snapshot) -> Bar {
    let members = budget.members.iter().filter_map(|member| {
        snapshot.instance(&member.name).map(|instance| bar_of_instance(instance, snapshot))
    });
    let add = |sum: (u64, u64), bar: Bar| {
        (sum.0.saturating_add(bar.used_bytes), sum.1.saturating_add(bar.cached_bytes))
    };
    let (used_bytes, cached_bytes) = members.fold((0, 0), add);
    let reserved_bytes = budget.granted_bytes.saturating_sub(used_bytes).saturating_sub(cached_bytes);
    Bar { used_bytes, cached_bytes, reserved_bytes, whole_bytes: budget.budget_bytes }
}

/// Of its limit, of the budget that it lives by, or else of its addresses.
fn bar_of_instance(instance: &Instance, snapshot: &Snapshot) -> Bar {
    let budget = || snapshot.budget_of(&instance.name).map(|budget| budget.budget_bytes);
    let whole_bytes = instance.limit_bytes.or_else(budget).unwrap_or(instance.total.virtual_bytes);
    let cached_bytes = instance.cached_bytes.min(instance.total.used_bytes);
    Bar {
        used_bytes: instance.total.used_bytes - cached_bytes,
        cached_bytes,
        reserved_bytes: instance.total.reserved_bytes,
        whole_bytes,
    }
}

fn draw_instances(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let instances = &state.snapshot.instances;
    if instances.is_empty() {
        frame.render_widget("no instances", area);
        return;
    }
    let longest = instances.iter().map(|instance| instance.name.len()).max().unwrap_or(0);
    let name_width = u16::try_from(longest.clamp("NAME".len(), MAX_NAME_WIDTH)).unwrap_or(NUMBER_WIDTH);
    let others = name_width + 1 + (NUMBER_WIDTH + 1) * NUMBERS.len() as u16;
    let bar_width = area.width.saturating_sub(others).max(MIN_BAR_WIDTH);
    let heading = |text: &'static str| Cell::from(Line::from(text).right_aligned());
    let header = [Cell::from("NAME"), Cell::from("")].into_iter().chain(NUMBERS.map(heading));
    let rows = instances.iter().enumerate().map(|(line, instance)| {
        // Not the whole row: its bar, reversed, would show what is free as held.
        let name = if line == state.selected { Style::new().reversed() } else { Style::new() };
        instance_row(instance, name, state, bar_width)
    });
    let widths = [name_width, bar_width].into_iter().chain([NUMBER_WIDTH; NUMBERS.len()]);
    let table =
        Table::new(rows, widths.map(Constraint::Length)).header(Row::new(header).style(Modifier::BOLD));
    let mut at = TableState::new().with_selected(state.selected);
    frame.render_stateful_widget(table, area, &mut at);
}

fn instance_row(instance: &Instance, name: Style, state: &State, bar_width: u16) -> Row<'static> {
    let number = |text: String, style: Style| Cell::from(Line::styled(text, style).right_aligned());
    let over = instance.limit_bytes.is_some_and(|limit| state.snapshot.held_by(&instance.name) > limit);
    let plain = Style::new();
    let alarm_if = |alarming: bool| if alarming { alarm(state.colours) } else { plain };
    Row::new([
        Cell::from(instance.name.clone()).style(name),
        Cell::from(bar_of_instance(instance, &state.snapshot).line(bar_width, state.colours)),
        number(compact(instance.total.used_bytes), plain),
        number(compact(instance.cached_bytes), plain),
        number(compact(instance.total.reserved_bytes), plain),
        number(limit(instance.limit_bytes), alarm_if(over)),
        number(compact(instance.min_bytes), plain),
        number(compact(instance.shortage_bytes), alarm_if(instance.shortage_bytes > 0)),
    ])
}

fn detail_line(state: &State) -> Line<'static> {
    let Some(instance) = state.selected() else { return Line::default() };
    let Instance { name, engine, pid, device, .. } = instance;
    let lost = match instance.total.quarantined_bytes {
        0 => String::new(),
        bytes => format!(", {} lost to quarantine", compact(bytes)),
    };
    let addresses = compact(instance.total.virtual_bytes);
    Line::from(format!("{name}: {engine}, pid {pid}, {device}, {addresses} of addresses{lost}"))
}

fn message_line(state: &State) -> Line<'static> {
    let Some(edit) = &state.edit else { return Line::from(state.message.clone()) };
    let Edit { name, term, input, .. } = edit;
    let question = match term {
        Term::Limit => format!("limit of {name} (a size, 0 to drain it, or none): "),
        Term::Min => format!("minimum of {name} (a size): "),
    };
    Line::from(vec![Span::raw(question), Span::raw(input.clone()), Span::styled(" ", Modifier::REVERSED)])
}

/// The keys; while something is typed that was not taken, why.
fn help_line(state: &State) -> Line<'static> {
    match &state.edit {
        None => Line::styled(KEYS, Modifier::DIM),
        Some(Edit { complaint: None, .. }) => Line::styled(KEYS_OF_EDIT, Modifier::DIM),
        Some(Edit { complaint: Some(why), .. }) => Line::styled(why.to_string(), alarm(state.colours)),
    }
}

fn limit(limit_bytes: Option<u64>) -> String {
    limit_bytes.map_or_else(|| "none".to_owned(), compact)
}

fn alarm(colours: bool) -> Style {
    let style = Style::new().add_modifier(Modifier::BOLD);
    if colours { style.fg(Color::Red) } else { style }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::buffer::Buffer;
    use ratatui::crossterm::event::KeyCode;

    use super::*;
    use crate::view::{Figures, Member};

    const GIB: u64 = 1 << 30;

    fn drawn(state: &State, width: u16, height: u16) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen(frame, state)).unwrap();
        terminal.backend().buffer().clone()
    }

    /// Lines without the spaces at their ends.
    fn text(buffer: &Buffer) -> String {
        let row = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..buffer.area.height).map(|y| row(y).trim_end().to_owned() + "\n").collect()
    }

    fn instance(name: &str, used_bytes: u64, cached_bytes: u64, reserved_bytes: u64) -> Instance {
        Instance {
            name: name.to_owned(),
            engine: "vllm 0.29.0".to_owned(),
            pid: 4711,
            device: "cuda:0".to_owned(),
            total: Figures { used_bytes, reserved_bytes, virtual_bytes: 64 * GIB, quarantined_bytes: 0 },
            cached_bytes,
            ..Instance::default()
        }
    }

    fn member(name: &str, granted_bytes: u64, shortage_bytes: u64) -> Member {
        Member { name: name.to_owned(), granted_bytes, shortage_bytes, ..Member::default() }
    }

    fn three() -> State {
        let mut draining = instance("qwen-draining", 6 * GIB, 0, GIB);
        draining.limit_bytes = Some(4 * GIB);
        let mut short = instance("llama-8b", 30 * GIB, 10 * GIB, 2 * GIB);
        short.min_bytes = 16 * GIB;
        short.shortage_bytes = 3 * GIB / 2;
        let mut alone = instance("tiny", GIB, 0, 0);
        alone.device = "cpu".to_owned();
        alone.total.quarantined_bytes = 2 << 20;
        let members = vec![member("qwen-draining", 7 * GIB, 0), member("llama-8b", 33 * GIB, 3 * GIB / 2)];
        let gpu = Budget {
            device: "GPU-5f0c9a1e-93c8-4b7e-b0c1-3d2f4f5a6b7c".to_owned(),
            budget_bytes: 40 * GIB,
            granted_bytes: 40 * GIB,
            free_bytes: 0,
            shortage_bytes: 3 * GIB / 2,
            members,
        };
        let (budget_bytes, free_bytes) = (256 * GIB, 256 * GIB);
        let host = Budget { device: "host".to_owned(), budget_bytes, free_bytes, ..Budget::default() };
        let snapshot = Snapshot {
            instances: vec![draining, short, alone],
            budgets: vec![gpu, host],
            ..Snapshot::default()
        };
        State::new(snapshot, true)
    }

    #[test]
    fn three_instances_on_two_devices() {
        let mut state = three();
        state.key(KeyCode::Down.into());
        assert_eq!(
            text(&drawn(&state, 100, 12)),
            "\
kvcached   █ used   ▓ cached   ▒ reserved   ░ free
GPU-5f0c9a1e ██████████████████████▓▓▓▓▓▓▓▓▓▒▒▒    40.00G of   40.00G,        0 free, 1.50G short
host         ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░         0 of  256.00G,  256.00G free

NAME                                               USED   CACHED RESERVED    LIMIT      MIN    SHORT
qwen-draining ███████████████████████████▒▒▒▒▒    6.00G        0    1.00G    4.00G        0        0
llama-8b      ████████████████▓▓▓▓▓▓▓▓▒▒░░░░░░   30.00G   10.00G    2.00G     none   16.00G    1.50G
tiny          █░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░    1.00G        0        0     none        0        0

llama-8b: vllm 0.29.0, pid 4711, cuda:0, 64.00G of addresses

↑↓ select   l limit   m minimum   q quit
"
        );
    }

    #[test]
    fn a_narrow_screen() {
        let mut state = three();
        state.selected = 2;
        state.message = "applied: tiny has limit none, minimum 0 B".to_owned();
        assert_eq!(
            text(&drawn(&state, 80, 12)),
            "\
kvcached   █ used   ▓ cached   ▒ reserved   ░ free
GPU-5f0c9a1e █████████▓▓▓▓▒    40.00G of   40.00G,        0 free, 1.50G short
host         ░░░░░░░░░░░░░░         0 of  256.00G,  256.00G free

NAME                           USED   CACHED RESERVED    LIMIT      MIN    SHORT
qwen-draining ██████████▒▒    6.00G        0    1.00G    4.00G        0        0
llama-8b      ██████▓▓▓▒░░   30.00G   10.00G    2.00G     none   16.00G    1.50G
tiny          ░░░░░░░░░░░░    1.00G        0        0     none        0        0

tiny: vllm 0.29.0, pid 4711, cpu, 64.00G of addresses, 2.00M lost to quarantine
applied: tiny has limit none, minimum 0 B
↑↓ select   l limit   m minimum   q quit
"
        );
    }

    #[test]
    fn nobody_is_there() {
        assert_eq!(
            text(&drawn(&State::new(Snapshot::default(), true), 60, 6)),
            "\
kvcached   █ used   ▓ cached   ▒ reserved   ░ free
no instances



↑↓ select   l limit   m minimum   q quit
"
        );
    }

    #[test]
    fn a_limit_being_typed() {
        let mut state = three();
        for key in "l12GB".chars() {
            state.key(KeyCode::Char(key).into());
        }
        let last_lines = |state: &State| {
            let text = text(&drawn(state, 80, 12));
            text.lines().skip(10).map(str::to_owned).collect::<Vec<_>>()
        };
        let question = "limit of qwen-draining (a size, 0 to drain it, or none): 12GB";
        assert_eq!(last_lines(&state), [question, "Enter ask   Esc leave it   sizes: 512M, 1.5GiB"]);
        state.key(KeyCode::Enter.into());
        assert_eq!(last_lines(&state), [question, "units are binary here: write G or GiB"]);
        state.key(KeyCode::Esc.into());
        state.key(KeyCode::Char('m').into());
        assert_eq!(last_lines(&state)[0], "minimum of qwen-draining (a size):");
    }

    #[test]
    fn a_screen_of_any_size_is_drawn() {
        for width in [1, 13, 40, 80, 200] {
            for height in 1..14 {
                drawn(&three(), width, height);
            }
        }
    }

    #[test]
    fn colours_can_be_left_out_and_nothing_is_told_by_them_alone() {
        let mut state = three();
        let coloured = drawn(&state, 100, 12);
        state.colours = false;
        let plain = drawn(&state, 100, 12);
        assert_eq!(text(&coloured), text(&plain));
        assert!(plain.content.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
        let red = |cell: &&ratatui::buffer::Cell| cell.fg == Color::Red;
        let alarming: String = coloured.content.iter().filter(red).map(|cell| cell.symbol()).collect();
        assert_eq!(alarming, ", 1.50G short   4.00G   1.50G");
    }

    #[test]
    fn the_chosen_instance_is_in_sight() {
        let instances = (0..50).map(|number| instance(&format!("i{number}"), 0, 0, 0)).collect();
        let mut state = State::new(Snapshot { instances, ..Snapshot::default() }, false);
        state.selected = 49;
        assert!(text(&drawn(&state, 80, 12)).contains("\ni49 "));
    }
}

use super::*;

#[test]
fn commands_are_found_with_their_positions() {
    let text = "# one\nLIB=/usr/local/lib\nLD_PRELOAD=\"/usr/lib/libtcmalloc.so\" sudo /usr/libexec/qemu-kvm \
                -m 16 \\\n -drive 'file=a,,b c.raw,if=none' -x \"q\\\"q\"; echo qemu; qemu-system-x86_64";
    let Found {
        commands, comments, ..
    } = commands(text, 0);
    assert_eq!(comments[0].0, "# one");
    assert_eq!(commands.len(), 2, "{commands:?}");
    let first = &commands[0];
    assert_eq!(first.variables[0].0, "LD_PRELOAD");
    assert_eq!(first.variables[0].1.text, "/usr/lib/libtcmalloc.so");
    assert_eq!(first.not_exported[0].0, "LIB");
    let words: Vec<_> = first
        .arguments
        .iter()
        .map(|word| word.text.as_str())
        .collect();
    assert_eq!(
        words,
        [
            "-m",
            "16",
            "-drive",
            "file=a,,b c.raw,if=none",
            "-x",
            "q\"q"
        ]
    );
    for word in &first.arguments {
        assert!(text[word.outer.range()].len() >= word.text.len());
    }
    assert_eq!(
        &text[first.arguments[3].inner().range()],
        "file=a,,b c.raw,if=none"
    );
    assert_eq!(&text[first.arguments[3].span(5, 9).range()], "a,,b");
}

#[test]
fn quoted_command_lines_are_read_back() {
    let arguments: Vec<_> = [
        "qemu-system-x86_64",
        "-blockdev",
        "{\"driver\":\"file\"}",
        "-S",
        "it's",
        "",
    ]
    .map(String::from)
    .into();
    let text = shell(&arguments);
    let commands = commands(&text, 0).commands;
    let words: Vec<_> = commands[0]
        .arguments
        .iter()
        .map(|word| word.text.clone())
        .collect();
    assert_eq!(words, arguments[1..]);
}

fn words_of(text: &str) -> Vec<Vec<String>> {
    let found = commands(text, 0);
    assert_eq!(found.broken, None, "{text}");
    let words = |command: Command| {
        command
            .arguments
            .into_iter()
            .map(|word| word.text)
            .collect()
    };
    found.commands.into_iter().map(words).collect()
}

/// What a shell hands to QEMU is what is read, byte for byte; the shell itself is asked.
#[test]
fn words_are_split_as_in_a_shell() {
    for script in [
        "kvm -drive file=a > /dev/null 2>&1",
        "kvm -m 1G 2>/dev/null -smp 2 </dev/null",
        "kvm -a >/dev/null -b",
        "kvm -a>/dev/null",
        "kvm -a2>/dev/null",
        "kvm -a 2 >/dev/null",
        "kvm -a 2>&- 3<&0",
        "kvm -a '2'>/dev/null",
        "kvm -a | cat",
        "kvm -a|cat",
        "kvm -a; echo kvm",
        "kvm -a && kvm -b || kvm -c",
        "kvm -a & wait",
        "kvm -a\\\n -b \\\n  -c",
        "kvm -a#b '#c' # kvm -d",
        "kvm a\"b c\"'d e'\\ f",
        "kvm \"a\\\"b\\$c\\d\" 'x\\y'",
        "kvm \"\" ''",
        "kvm -a <<EOF -b\nkvm -c\n'it\nEOF\nkvm -d",
        "kvm -a <<-'END'\n\tx $(\n\tEND\nkvm -e",
        "if kvm -a; then kvm -b; else kvm -c; fi",
        "run() { kvm -a; }\nrun",
        "case x in y) kvm -a;; x) kvm -b;; esac",
        "( kvm -a; kvm -b )",
        "! kvm -a",
        "A=1 B='2 3' kvm -a",
        "env C=4 kvm -a",
        "command kvm -a",
        "echo kvm -a >/dev/null; command -v kvm >/dev/null; kvm -b",
        "x=$(kvm -a); kvm -b",
        "kvm -a; exit\n",
    ] {
        // Only what is read as a command of its own counts; what is in a substitution does not reach the output.
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("kvm");
        let out = dir.path().join("out");
        let text = format!(
            "#!/bin/sh\n{{ for a; do printf '%s\\0' \"$a\"; done; printf '\\n\\0'; }} >> '{}'\n",
            out.display()
        );
        std::fs::write(&program, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let path = format!(
            "{}:{}",
            dir.path().display(),
            std::env::var("PATH").unwrap()
        );
        let ran = std::process::Command::new("sh")
            .args(["-c", script])
            .env("PATH", path)
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        let _ = ran;
        let output = std::fs::read_to_string(&out).unwrap();
        let mut ran: Vec<Vec<String>> = vec![Vec::new()];
        for word in output.split_terminator('\0') {
            match word {
                "\n" => ran.push(Vec::new()),
                word => ran.last_mut().unwrap().push(word.to_owned()),
            }
        }
        ran.pop();
        // What a shell runs is a part of what is there: branches are not taken, and substitutions are not read.
        let read = words_of(script);
        for command in &ran {
            let in_substitution = script.contains("$(kvm") && command == &["-a"];
            assert!(
                in_substitution || read.contains(command),
                "{script:?}: {ran:?}, read {read:?}"
            );
        }
        assert!(!ran.is_empty() && read.len() <= 4, "{script:?}: {read:?}");
    }
}

/// What only a running shell knows stays as it is written, and is marked.
#[test]
fn variables_are_marked_as_unknown() {
    for (script, words) in [
        (
            "kvm $OPTS -m 1",
            vec![("$OPTS", true), ("-m", false), ("1", false)],
        ),
        ("kvm \"$@\"", vec![("$@", true)]),
        ("kvm ${OPTS[@]} x", vec![("${OPTS[@]}", true), ("x", false)]),
        ("kvm file=\"${A:-b, c}\"", vec![("file=${A:-b, c}", true)]),
        (
            "kvm $(ls | grep \")\" # )\n) y",
            vec![("$(ls | grep \")\" # )\n)", true), ("y", false)],
        ),
        ("kvm `ls a` x", vec![("`ls a`", true), ("x", false)]),
        (
            "kvm $((1 << (2+3))) z",
            vec![("$((1 << (2+3)))", true), ("z", false)],
        ),
        ("kvm $'a\\'b' z", vec![("$'a\\'b'", true), ("z", false)]),
        (
            "kvm /vms/*.img {a,b}",
            vec![("/vms/*.img", true), ("{a,b}", true)],
        ),
        (
            "kvm <(ls) $ '$A' \\$B",
            vec![("<(ls)", true), ("$", false), ("$A", false), ("$B", false)],
        ),
        ("kvm &>log -b", vec![("-b", false)]),
        ("kvm <<< \"$A\" -b", vec![("-b", false)]),
        ("kvm {fd}>log -b", vec![("-b", false)]),
    ] {
        let found = commands(script, 0);
        let read: Vec<_> = found.commands[0]
            .arguments
            .iter()
            .map(|word| (word.text.as_str(), !word.unknown.is_empty()))
            .collect();
        assert_eq!(found.broken, None, "{script:?}");
        assert_eq!(read, words, "{script:?}");
    }
}

#[test]
fn invalid_scripts_are_refused() {
    for (script, at, why) in [
        ("kvm -a 'b", 7, "quote"),
        ("kvm -a \"b$(c\"", 12, "quote"),
        ("kvm -a b$(c", 8, "substitution"),
        ("kvm -a >", 7, "target"),
        ("kvm -a >\nkvm -b", 7, "target"),
        ("kvm <<EOF\nkvm -b\n", 4, "here-document"),
        ("kvm -a `b", 7, "quote"),
        ("qemu-system-x86_64 -m 1 ^\n -smp 2", 24, "batch file"),
    ] {
        let (place, problem) = commands(script, 0).broken.expect(script);
        assert!(problem.contains(why), "{script:?}: {problem}");
        assert_eq!(place, at, "{script:?}: {problem}");
    }
}

/// A name of QEMU in the arguments of another program starts nothing.
#[test]
fn only_commands_that_start_qemu_are_read() {
    for script in [
        "echo qemu-system-x86_64 -drive file=a",
        "which qemu-system-x86_64",
        "command -v kvm",
        "sudo apt install qemu-kvm qemu",
        "sudo modprobe kvm",
        "pgrep -f qemu-system-x86_64",
        "OPTS=(qemu-system-x86_64 -drive file=a)",
        "$QEMU -drive file=a",
        "cat > start <<EOF\nqemu-system-x86_64 -m 1\nEOF",
    ] {
        assert!(commands(script, 0).commands.is_empty(), "{script}");
    }
    for script in [
        "sudo -u qemu /usr/bin/qemu-system-x86_64 -m 1",
        "exec nice -n 5 taskset -c 0-3 qemu-kvm -m 1",
        "timeout 60s kvm -m 1",
        "numactl --membind 0 -- kvm -m 1",
        "then sudo -E env A=b qemu-system-x86_64 -m 1",
    ] {
        assert_eq!(words_of(script), [["-m", "1"]], "{script}");
    }
}

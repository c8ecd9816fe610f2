//! Stands in for `nvidia-cuda-mps-control` in tests: the same commands and files, without a GPU.
//!
//! With `-f` it is the daemon; without arguments it passes its standard input to the daemon. The
//! daemon appends each command to `commands` in the program's folder.
//!
//! `fake_client PID` makes that process a client, `fake_fault PID` reports a fault of that client,
//! and after `fake_deaf` the daemon answers no more commands.
#![expect(clippy::disallowed_methods, reason = "a stand-in polls")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

fn folder(variable: &str) -> PathBuf {
    std::env::var_os(variable).expect(variable).into()
}

fn main() {
    let socket = folder("CUDA_MPS_PIPE_DIRECTORY").join("control");
    match std::env::args().nth(1).as_deref() {
        Some("-f") => daemon(&socket),
        Some("--server") => loop {
            std::thread::park();
        },
        _ => {
            let Ok(mut daemon) = UnixStream::connect(&socket) else {
                println!("Cannot find MPS control daemon process");
                std::process::exit(1);
            };
            // The real daemon serves one caller at a time.
            let turn = append(&socket.with_file_name("turn"));
            if turn.try_lock().is_err() {
                println!("An instance of this daemon is already in use");
                std::process::exit(1);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
            let mut said = Vec::new();
            std::io::stdin().read_to_end(&mut said).unwrap();
            daemon.write_all(&said).unwrap();
            daemon.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            daemon.read_to_string(&mut answer).unwrap();
            print!("{answer}");
        }
    }
}

fn append(path: &Path) -> File {
    OpenOptions::new().create(true).append(true).open(path).unwrap()
}

/// Returns `true` if /proc shows a running process; a zombie is not alive.
fn alive(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|s| s.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z')))
}

fn daemon(socket: &Path) {
    let program = std::env::current_exe().unwrap();
    let mut commands = append(&program.with_file_name("commands"));
    let mut log = append(&folder("CUDA_MPS_LOG_DIRECTORY").join("server.log"));
    let mut server: Option<Child> = None;
    let mut state = "ACTIVE";
    let mut clients: Vec<String> = Vec::new();
    let start = |server: &mut Option<Child>| {
        server.get_or_insert_with(|| Command::new(&program).arg("--server").spawn().unwrap());
    };
    for client in UnixListener::bind(socket).unwrap().incoming() {
        let mut client = client.unwrap();
        let lines: Vec<String> = BufReader::new(&client).lines().map_while(Result::ok).collect();
        for line in lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            let note = match words.as_slice() {
                ["terminate_client", _, pid] => {
                    if alive(pid) {
                        " (alive)"
                    } else {
                        " (gone)"
                    }
                }
                _ => "",
            };
            writeln!(commands, "{line}{note}").unwrap();
            let answer = match words.as_slice() {
                ["get_server_list"] => server.as_ref().map_or(String::new(), |s| s.id().to_string()),
                ["get_server_status", _] => state.into(),
                ["terminate_client", _, pid] => {
                    clients.retain(|client| client != pid);
                    "0".into()
                }
                ["get_client_list", _] => clients.join("\n"),
                ["fake_client", pid] => {
                    clients.push(pid.to_string());
                    String::new()
                }
                ["start_server", "-uid", _] => {
                    start(&mut server);
                    String::new()
                }
                ["fake_fault", pid] => {
                    state = "FAULT";
                    let id = server.as_ref().map_or(0, Child::id);
                    writeln!(log, "[2026-11-21 14:50:00.123 Server {id}] Client {{{pid}, 1}} encountered a fatal GPU error.").unwrap();
                    String::new()
                }
                ["fake_deaf"] => loop {
                    std::thread::park();
                },
                ["quit", ..] => {
                    if let Some(mut server) = server.take() {
                        let _ = server.kill();
                        let _ = server.wait();
                    }
                    let _ = client.write_all(b"\n");
                    return;
                }
                [command, .., value] if command.starts_with("set_") => value.to_string(),
                _ => String::new(),
            };
            writeln!(client, "{answer}").unwrap();
        }
    }
}

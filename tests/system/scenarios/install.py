"""The README's five commands, word for word, on two hosts; then the lease that it configures."""
import re

from harness import CLIENT_PACKAGES, ROOT, SIM, Host, expect

ORDER = 12
COMMANDS = 5


def section():
    """Returns the README's commands without comments, and text and path of its configuration."""
    text = (ROOT / "README.md").read_text().split("## Install")[1].split("\n## ")[0]
    commands = re.search(r"```sh\n(.*?)```", text, re.S).group(1)
    configuration = re.search(r"write `(.*?)` into `(.*?)`", text).groups()
    return [line.split("  #")[0].strip() for line in commands.splitlines()], configuration


def run(site, check):
    commands, (configuration, file) = section()
    gpu_host, client = Host("gpuhost"), Host("vm-1")
    with check(f"the README has {COMMANDS} commands: three for the GPU host, two for the client"):
        assert len(commands) == COMMANDS, commands
        install_server, init, token, install_client, join = commands
    site.boot("gpuhost", "vm-1")
    # Simulated cards; the packages' files lie in the folder where the commands run.
    gpu_host.write("/etc/systemd/system/gpuserver.service.d/simulated.conf", "[Service]\nEnvironment=SIMGPU_DEVICES=2\n")
    gpu_host.write("/etc/gpusession/gpuserver.d/simulated.toml", f'driver = "{SIM}"\n')
    gpu_host.install([site.deb("gpusession-libs")])
    gpu_host.push([site.deb("gpuserver")], "/root")
    client.push([site.deb(name) for name in CLIENT_PACKAGES], "/root")
    client.push([site.programs / "vectorAdd"], "/usr/local/bin")
    apt = "DEBIAN_FRONTEND=noninteractive {} </dev/null 2>&1"
    with check("the commands of the GPU host install and start a server, which starts with the next boot too"):
        gpu_host.ok(apt.format(install_server), timeout=120)
        expect(gpu_host.ok(init), "Next: run `gpuserver token create`")
        gpu_host.ok("systemctl is-active gpuserver && systemctl is-enabled gpuserver")
        printed = gpu_host.ok(f"{token} 2>/dev/null")
    with check("the commands of the client install, join with the token and start the daemon"):
        client.ok(apt.format(install_client), timeout=120)
        expect(client.ok(join.replace("GPUHOST", "gpuhost"), stdin=printed + "\n"), "joined the pool as vm-1")
        client.ok("systemctl is-active gpusession && systemctl is-enabled gpusession")
    with check("root runs a program on a GPU; with the README's configuration, so does every login"):
        expect(client.ok("gpusession run vectorAdd", timeout=60), "sums right")
        client.write(file, configuration + "\n")
        client.ok("systemctl reload gpusession")
        client.until("gpusession status | grep -q 'is ready'", 20)
        expect(client.ok("su -l alice -c vectorAdd"), "sums right")
        client.ok("gpusession health --gpu", timeout=60)
    with check("a second `join --now` and `pool init --now` change nothing"):
        expect(client.run("gpusession join --now gpuhost </dev/null 2>&1").out, "has an identity already")
        expect(gpu_host.run("gpuserver pool init --now 2>&1").out, "gpuserver: ")
        gpu_host.ok("gpuserver clients | grep vm-1")
